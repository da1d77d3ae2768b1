"""Add the optional tokens of chunks, such as draft tokens, to a step that has budget and blocks left."""

from minillm.cache import BlockManager, OutOfBlocks
from minillm.sequence import Schedule


def extend(schedule: Schedule, budget: int, cache: BlockManager) -> None:
    """Let decodes include draft tokens while budget and blocks are left, but none if a group was preempted."""
    optional = [chunk for chunk in schedule.decodes if chunk.optional]
    if not optional:
        return
    for chunk in optional:
        chunk.optional = 0 if schedule.preempted else min(chunk.optional, max(0, budget))
        try:
            cache.append(chunk.sequence.own_table, chunk.optional)
        except OutOfBlocks:
            chunk.optional = 0
        budget -= chunk.optional
    schedule.extended = [chunk for chunk in optional if chunk.optional]
    schedule.decodes = [chunk for chunk in schedule.decodes if not chunk.optional]
