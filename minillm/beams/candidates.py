"""The best continuations of all beams of all requests, found on the device together."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm import kernels
from minillm.beams.search import BeamSearch, Candidate
from minillm.outputs import TokenLogprobs
from minillm.params import BeamSearchParams
from minillm.runner.penalties import needs_processing, process_logits
from minillm.sequence import Sequence, SequenceGroup


@dataclass(frozen=True)
class BeamStep:
    """One request's beams at this step: ``rows[g][i]`` is the row of logits of beam i of search g, ``beams[g][i]``."""

    group: SequenceGroup
    rows: list[list[int]]
    beams: list[list[Sequence]]

    @property
    def params(self) -> BeamSearchParams:
        assert isinstance(self.group.params, BeamSearchParams)
        return self.group.params

    @property
    def searches(self) -> list[BeamSearch]:
        return self.group.state.searches


@torch.inference_mode()
def beam_candidates(logits: Tensor, steps: SequenceOf[BeamStep]) -> list[list[list[Candidate]]]:
    """For each step, for each of its groups: the best continuations, the best first.

    The vocabulary is searched on the device; the few tokens found for each beam come to the host, which compares beams.

    Args:
        logits: ``[n, vocab]``. Where a row holds NaN, so do all its candidates.
    """
    rows = [row for step in steps for group in step.rows for row in group]
    owners = [(step, s) for step in steps for group in step.beams for s in group]
    # A diversity penalty takes continuations away from a group; at most as many others replace them.
    extra = max((step.params.beam_width for step in steps if len(step.searches) > 1), default=0)
    wanted = max(s.num_candidates(len(step.group.end_ids)) for step in steps for s in step.searches) + extra
    if rows != list(range(len(logits))):
        logits = logits[torch.tensor(rows, device=logits.device)]
    values, ids = (found.cpu() for found in _best_tokens(logits, owners, min(wanted, logits.shape[1])))

    result: list[list[list[Candidate]]] = [[] for _ in steps]
    # Groups of the same shape are one top-k on the device; groups that pay for each other's choices go one by one.
    shapes: dict[tuple[int, int], list[tuple[int, int, BeamSearch]]] = {}
    first = 0
    for number, step in enumerate(steps):
        if len(step.searches) > 1:
            end = first + sum(map(len, step.rows))
            result[number] = _diverse(step, values[first:end].tolist(), ids[first:end].tolist())
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
    """``(log-probabilities, token ids)`` ``[rows, count]`` of each beam's best next tokens, as penalties and grammar
    leave them.
    """
    values, ids = kernels.top_log_probabilities(logits, count)
    pairs = [(step.group, sequence) for step, sequence in owners]
    if rows := [row for row, pair in enumerate(pairs) if needs_processing(*pair)]:
        log_probs = logits[rows].float().log_softmax(-1)
        process_logits(log_probs, [pairs[row] for row in rows])
        # Found by the same kernel, but not brought to a sum of one. In a row of NaN it finds any numbers.
        found = kernels.top_log_probabilities(log_probs, count)[1].clamp(0, logits.shape[1] - 1)
        values[rows], ids[rows] = log_probs.gather(1, found), found
    return values, ids


def _diverse(step: BeamStep, values: list[list[float]], ids: list[list[int]]) -> list[list[Candidate]]:
    """Diverse beam search: each group pays for the tokens that the groups before it are about to choose."""
    result = []
    chosen: Counter[int] = Counter()
    first = 0
    for search, rows in zip(step.searches, step.rows, strict=True):
        candidates = [
            Candidate(value - step.params.diversity_penalty * chosen[token_id] + search.logprobs[beam], beam, token_id)
            for beam in range(len(rows))
            for value, token_id in zip(values[first + beam], ids[first + beam], strict=True)
        ]
        first += len(rows)
        candidates.sort(key=lambda candidate: -candidate.logprob)
        result.append(candidates[: search.num_candidates(len(step.group.end_ids))])
        if not search.done:
            living = [c for c in result[-1] if c.token_id not in step.group.end_ids][: search.width]
            chosen.update(candidate.token_id for candidate in living)
    return result


@torch.inference_mode()
def token_logprobs(logits: Tensor, wanted: SequenceOf[tuple[int, int]], count: int) -> list[TokenLogprobs]:
    """The log-probability of (row of logits, token id) pairs, with the ``count`` most probable tokens of the row."""
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
