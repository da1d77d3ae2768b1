"""How many blocks a group will need: the arithmetic of admission.

A group is admitted when its prompt fits, and when the peak that it and the running ones are heading for does, too, as
in LightLLM's router: after the i-th of the running sequences to finish, those that are left hold what they hold now and
i times as many tokens more.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.cache import BlockManager
from minillm.sequence import SequenceGroup, Stage


def blocks_at_most(group: SequenceGroup, block_size: int) -> int:
    """The blocks that a group holds if none of its sequences ends before it has to."""
    shared = group.num_prompt_tokens // block_size
    longest = group.num_prompt_tokens + group.max_tokens
    return shared + group.params.num_sequences * (-(-longest // block_size) - shared)


def blocks_to_finish_prompt(group: SequenceGroup, block_size: int) -> int:
    """The blocks of all tokens that the group has so far, and of one more token for each of its sequences."""
    shared = group.num_prompt_tokens // block_size
    lengths = [len(sequence.token_ids) for sequence in group.unfinished]
    lengths += [group.num_prompt_tokens] * (group.num_seqs - len(lengths))
    return shared + sum(-(-(length + 1) // block_size) - shared for length in lengths)


def blocks_promised(group: SequenceGroup, block_size: int) -> int:
    """The blocks that a running group still needs to finish its prompt."""
    prompt = group.num_prompt_tokens if group.stage is Stage.PROMPT else 0
    if all((prompt or sequence.num_tokens) - sequence.num_computed <= 1 for sequence in group.computing):
        return 0
    tables = [sequence.table for sequence in group.sequences if sequence.table is not None]
    held = len(tables[0].blocks) if len(tables) == 1 else len({b for table in tables for b in table.blocks})
    return max(0, blocks_to_finish_prompt(group, block_size) - held)


def peak_fits(group: SequenceGroup, running: Sequence[SequenceGroup], cache: BlockManager, num_pinned: int) -> bool:
    """Whether the blocks that the running sequences and those of ``group`` are heading for fit at their peak.

    Worst cases rarely come true, so where half of the pool is free the group is admitted in any case.
    """
    if not running or 2 * cache.num_free > cache.num_blocks:
        return True
    ahead = []  # (tokens still to come, tokens held by this sequence alone) of every sequence
    shared = 0
    for each in (*running, group):
        shared += each.num_prompt_tokens
        sequences = each.unfinished
        for i in range(each.num_seqs):
            output = sequences[i].num_output_tokens if i < len(sequences) else 0
            ahead.append((each.max_tokens - output, output))
    ahead.sort(reverse=True)
    peak = held = 0
    for number, (left, own) in enumerate(ahead, 1):
        held += own
        peak = max(peak, held + number * left)
    return -(-(shared + peak) // cache.block_size) <= cache.num_blocks - num_pinned


def is_being_computed(
    group: SequenceGroup, prompt: list[int], known: int, running: Sequence[SequenceGroup], block_size: int
) -> bool:
    """Whether a running group computes a block of ``prompt`` right now that lies behind its ``known`` tokens."""
    end = known + block_size
    if end >= len(prompt):
        return False
    for other in running:
        sequence = other.sequences[0]
        theirs = sequence.token_ids
        # Most differ in the first token of the block in question, so that is looked at first.
        if len(theirs) < end or theirs[known] != prompt[known] or other.salt != group.salt:
            continue
        computing = sequence.num_computed < min(sequence.num_prompt_tokens, len(theirs) - 1)
        if computing and theirs[known:end] == prompt[known:end] and theirs[:known] == prompt[:known]:
            return True
    return False
