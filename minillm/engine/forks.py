"""Fork sequences: for beams and branches, and for answers at several depths of a reasoning (`minillm.depths`)."""

from dataclasses import replace

from minillm.engine.requests import Requests
from minillm.outputs import CompletionOutput
from minillm.params import SamplingParams
from minillm.sequence import PROMPT, Sequence, SequenceGroup


def fork(requests: Requests, parent: Sequence, num_tokens: int) -> Sequence:
    """Return a new sequence with the first ``num_tokens`` tokens of ``parent``.

    The new sequence's table shares the blocks of these tokens.
    """
    child = Sequence(requests.new_seq_id(), parent.token_ids[:num_tokens], parent.num_prompt_tokens)
    child.num_computed = min(num_tokens, parent.num_computed)
    child.table = requests.scheduler.cache.fork(parent.own_table, child.seq_id, child.num_computed)
    child.reasoning_position = None if parent.reasoning_position is None else parent.reasoning_position.copy()
    return child


def fork_at_depth(requests: Requests, group: SequenceGroup, sequence: Sequence) -> None:
    """If the reasoning has reached the next of the requested depths, fork a sequence that stops reasoning here.

    ``sequence`` is the group's first sequence, which reasons longest.
    """
    assert isinstance(group.params, SamplingParams)
    depths, number, position = group.params.reasoning_depths, len(group.sequences), sequence.reasoning_position
    if number > len(depths) or position is None or position.depth(sequence.token_ids) != depths[number - 1]:
        return
    if sequence.seq_id in requests.scheduler.preemption.swap.saved:  # forks of saved sequences are not kept
        requests.scheduler.preemption.start_over(group)
    child = Sequence(requests.new_seq_id(), list(sequence.token_ids), sequence.num_prompt_tokens, number - 1)
    child.seed, child.reasoning_position = sequence.seed, position.copy(depths[number - 1])
    child.text = None if sequence.text is None else sequence.text.copy()
    child.matcher = None if sequence.matcher is None else sequence.matcher.copy()
    child.logprobs, child.cumulative_logprob = sequence.logprobs.copy(), sequence.cumulative_logprob
    group.sequences.append(child)
    if sequence.table is not None and group.stage is not PROMPT:
        # The child computes its last token itself, for its own logits.
        child.num_computed = min(sequence.num_computed, len(child.token_ids) - 1)
        child.table = requests.scheduler.cache.fork(sequence.table, child.seq_id, child.num_computed)


def at_all_depths(outputs: list[CompletionOutput]) -> list[CompletionOutput]:
    """Return the outputs in the order of their indices, the deepest last.

    Where the reasoning ended before a depth, a limit would have changed nothing: the deepest output stands for it.
    """
    deepest = outputs[0]
    outputs += [replace(deepest, index=i) for i in range(len(outputs) - 1, deepest.index)]
    return sorted(outputs, key=lambda output: output.index)
