"""How many blocks a group will need: the arithmetic of admission.

A group is admitted when its prompt fits, and when the peak that it and the running ones are heading for does, too, as
in LightLLM's router: after the i-th of the running sequences to finish, those that are left hold what they hold now and
i times as many tokens more.
"""

from __future__ import annotations

from collections.abc import Iterable

from minillm.sequence import SequenceGroup


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
    if not any(group.num_tokens_to_compute(sequence) > 1 for sequence in group.computing):
        return 0
    tables = [sequence.table for sequence in group.sequences if sequence.table is not None]
    held = len(tables[0].blocks) if len(tables) == 1 else len({b for table in tables for b in table.blocks})
    return max(0, blocks_to_finish_prompt(group, block_size) - held)


def peak_blocks(groups: Iterable[SequenceGroup], block_size: int) -> int:
    """The blocks that ``groups`` hold at their peak if every sequence grows as long as it may."""
    ahead = []  # (tokens still to come, tokens held by this sequence alone) of every sequence
    shared = 0
    for group in groups:
        shared += group.num_prompt_tokens
        sequences = group.unfinished
        for i in range(group.num_seqs):
            output = sequences[i].num_output_tokens if i < len(sequences) else 0
            ahead.append((group.max_tokens - output, output))
    ahead.sort(reverse=True)
    peak = held = 0
    for number, (left, own) in enumerate(ahead, 1):
        held += own
        peak = max(peak, held + number * left)
    return -(-(shared + peak) // block_size)


def computes_the_same(group: SequenceGroup, prompt: list[int], known: int, end: int) -> bool:
    """Whether a running ``group`` computes ``prompt[known:end]`` right now, behind the same tokens."""
    sequence = group.sequences[0]
    theirs = sequence.token_ids
    # Most differ in the first token of the block in question, so that is looked at first.
    if len(theirs) < end or theirs[known] != prompt[known]:
        return False
    computing = sequence.num_computed < min(sequence.num_prompt_tokens, len(theirs) - 1)
    return computing and theirs[known:end] == prompt[known:end] and theirs[:known] == prompt[:known]
