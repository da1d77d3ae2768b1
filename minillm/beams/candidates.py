"""Find the best continuations of beams, for beam searches that the CPU advances.

The device finds each beam's best next tokens. The CPU then compares the beams.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from minillm import kernels
from minillm.beams.choice import Choice
from minillm.beams.search import BeamSearch, Candidate
from minillm.outputs import TokenLogprobs
from minillm.params import BeamSearchParams
from minillm.runner.penalties import needs_processing, process_logits
from minillm.sequence import Sequence, SequenceGroup

Pairs = list[tuple[float, int]]  # (log-probability, token id) of one beam's best next tokens


@dataclass(frozen=True)
class BeamStep:
    """One request's beams in one step: a `Choice` for each search.

    In diverse beam search, each group of beams has a search of its own. Otherwise there is one search.
    """

    group: SequenceGroup
    choices: list[Choice]

    @property
    def rows(self) -> list[list[int]]:
        """``rows[g][i]`` is the row of logits of beam i of search g."""
        return [choice.rows for choice in self.choices]

    @property
    def beams(self) -> list[list[Sequence]]:
        return [choice.beams for choice in self.choices]

    @property
    def params(self) -> BeamSearchParams:
        assert isinstance(self.group.params, BeamSearchParams)
        return self.group.params

    @property
    def searches(self) -> list[BeamSearch]:
        return self.group.state.searches

    @property
    def in_turn(self) -> bool:
        """Return whether the groups of beams must be processed one after another.

        The diversity penalty of a group depends on the tokens that earlier groups chose. A repetition penalty or a
        logits processor is applied after the diversity penalty. So if the request has one of the two, each group waits
        for the groups before it.
        """
        params = self.params
        follows = params.repetition_penalty != 1.0 or params.logits_processor is not None
        return follows and len(self.choices) > 1 and params.diversity_penalty > 0


@torch.inference_mode()
def beam_candidates(logits: Tensor, steps: SequenceOf[BeamStep]) -> list[list[list[Candidate]]]:
    """Return the best continuations of the beams, best first: a list for each step, and in it a list for each search.

    The device finds each beam's best next tokens. Only these are copied to the CPU, which compares beams.

    Args:
        logits: ``[n, vocab]``. If a row contains NaN, the log-probabilities of all candidates from this row are NaN.
    """
    together = [step for step in steps if not step.in_turn]
    found = iter(_together(logits, together) if together else [])
    return [_in_turn(logits, step) if step.in_turn else next(found) for step in steps]


def _together(logits: Tensor, steps: SequenceOf[BeamStep]) -> list[list[list[Candidate]]]:
    rows = [row for step in steps for group in step.rows for row in group]
    owners = [(step, s) for step in steps for group in step.beams for s in group]
    # A diversity penalty lowers at most beam_width continuations of a group. Find that many more to replace them.
    extra = max((step.params.beam_width for step in steps if len(step.searches) > 1), default=0)
    wanted = max(s.num_candidates(len(step.group.end_ids)) for step in steps for s in step.searches) + extra
    if rows != list(range(len(logits))):
        logits = logits[torch.tensor(rows, device=logits.device)]
    values, ids = (found.cpu() for found in _best_tokens(logits, owners, min(wanted, logits.shape[1])))

    result: list[list[list[Candidate]]] = [[] for _ in steps]
    # Requests with the same width and number of candidates share one top-k. Diverse search compares groups one by one.
    shapes: dict[tuple[int, int], list[tuple[int, int, BeamSearch]]] = {}
    first = 0
    for number, step in enumerate(steps):
        if len(step.searches) > 1:
            end = first + sum(map(len, step.rows))
            result[number] = _diverse(step, _charged(step, values[first:end].tolist(), ids[first:end].tolist()))
        else:
            search, end = step.searches[0], first + len(step.rows[0])
            keep = search.num_candidates(len(step.group.end_ids))
            shapes.setdefault((end - first, keep), []).append((number, first, search))
        first = end
    for (count, keep), members in shapes.items():
        at = torch.tensor([range(first, first + count) for _, first, _ in members])
        so_far = torch.tensor([search.logprobs[:count] for _, _, search in members])
        each = min(keep, values.shape[1])
        scores = (values[at][:, :, :each] + so_far[:, :, None]).flatten(1)
        best, where = scores.topk(min(keep, scores.shape[1]))
        tokens = ids[at][:, :, :each].flatten(1).gather(1, where)
        rows_of = (where // each).tolist()
        for (number, _, _), *columns in zip(members, best.tolist(), rows_of, tokens.tolist(), strict=True):
            result[number] = [[Candidate(*entry) for entry in zip(*columns, strict=True)]]
    return result


def _best_tokens(logits: Tensor, owners: list[tuple[BeamStep, Sequence]], count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best next tokens of each beam, after penalties and grammar masks.

    Returns:
        Log-probabilities and token ids, both ``[beams, count]``, in the order of ``owners``.
    """
    values, ids = kernels.top_log_probabilities(logits, count)
    pairs = [(step.group, sequence) for step, sequence in owners]
    if rows := [row for row, pair in enumerate(pairs) if needs_processing(*pair)]:
        log_probs = logits[rows].float().log_softmax(-1)
        process_logits(log_probs, [pairs[row] for row in rows])
        # The same kernel finds the ids, but the values are not normalized again. In a row of NaN its ids are arbitrary.
        found = kernels.top_log_probabilities(log_probs, count)[1].clamp(0, logits.shape[1] - 1)
        values[rows], ids[rows] = log_probs.gather(1, found), found
    return values, ids


def _diverse(step: BeamStep, best: Callable[[int, Counter[int]], list[Pairs]]) -> list[list[Candidate]]:
    """Run one step of diverse beam search: penalize tokens by how often earlier groups chose them in this step.

    A group whose search is finished has no beams, so it chooses nothing.

    Args:
        best: returns the best next tokens of a group's beams, with the penalty subtracted. Its arguments are the
            group's number and how often earlier groups chose each token.
    """
    result = []
    chosen: Counter[int] = Counter()
    for number, (search, choice) in enumerate(zip(step.searches, step.choices, strict=True)):
        candidates = [
            Candidate(value + search.logprobs[beam], beam, token_id)
            for beam, pairs in enumerate(best(number, chosen))
            for value, token_id in pairs
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)
        result.append(candidates[: search.num_candidates(len(step.group.end_ids))])
        living = (c for c in result[-1] if c.logprob > float("-inf") and not choice.ends(c))
        chosen.update(candidate.token_id for candidate in islice(living, search.width))
    return result


def _charged(
    step: BeamStep, values: list[list[float]], ids: list[list[int]]
) -> Callable[[int, Counter[int]], list[Pairs]]:
    """Return a function for `_diverse` that subtracts the diversity penalty from the log-probabilities of tokens.

    ``values`` and ``ids`` list the best next tokens of each beam of all groups, found without the penalty: their
    log-probabilities and their ids.
    """
    ends = list(accumulate(map(len, step.rows)))

    def best(number: int, chosen: Counter[int]) -> list[Pairs]:
        rows, price = slice(ends[number] - len(step.rows[number]), ends[number]), step.params.diversity_penalty
        pairs = (zip(*row, strict=True) for row in zip(values[rows], ids[rows], strict=True))
        return [[(value - price * chosen[token_id], token_id) for value, token_id in row] for row in pairs]

    return best


def _in_turn(logits: Tensor, step: BeamStep) -> list[list[Candidate]]:
    """Run `_diverse`, and find each group's best tokens only after the group before it has chosen.

    The diversity penalty is applied first, then all other processing, as in Hugging Face transformers.
    """

    def best(number: int, chosen: Counter[int]) -> list[Pairs]:
        choice, count = step.choices[number], step.searches[number].num_candidates(len(step.group.end_ids))
        if not choice.rows:
            return []
        log_probs = logits[choice.rows].float().log_softmax(-1)
        tokens = torch.tensor(list(chosen), dtype=torch.int64, device=logits.device)
        prices = step.params.diversity_penalty * torch.tensor(list(chosen.values()), device=logits.device)
        log_probs[:, tokens] -= prices
        process_logits(log_probs, [(step.group, beam) for beam in choice.beams])
        ids = kernels.top_log_probabilities(log_probs, min(count, logits.shape[1]))[1].clamp(0, logits.shape[1] - 1)
        values = log_probs.gather(1, ids).tolist()
        return [list(zip(*row, strict=True)) for row in zip(values, ids.tolist(), strict=True)]

    return _diverse(step, best)


@torch.inference_mode()
def token_logprobs(logits: Tensor, wanted: SequenceOf[tuple[int, int]], count: int) -> list[TokenLogprobs]:
    """Return the log-probability of each wanted token, and the ``count`` most probable tokens at its position.

    Args:
        logits: ``[n, vocab]``.
        wanted: (row of logits, token id) pairs.
        count: if it is negative, the whole vocabulary is listed.
    """
    if not wanted:
        return []
    device = logits.device
    chosen = logits[torch.tensor([row for row, _ in wanted], device=device)]
    picked = kernels.log_probabilities(chosen, torch.tensor([token_id for _, token_id in wanted], device=device))
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(wanted)
    if count:
        most = logits.shape[1] if count < 0 else min(count, logits.shape[1])
        values, ids = (found.tolist() for found in kernels.top_log_probabilities(chosen, most))
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    found = zip(wanted, picked.tolist(), tops, strict=True)
    return [TokenLogprobs(token_id, logprob, top) for (_, token_id), logprob, top in found]
