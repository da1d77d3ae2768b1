"""Log-probabilities of a prompt's tokens, computed together with its K and V."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm import kernels
from minillm.model.llama import Batch, Llama
from minillm.model.shard import ranks_of
from minillm.outputs import PromptTokenLogprobs
from minillm.runner.step import ChunkWork
from minillm.runner.to_host import ToHost
from minillm.sequence import Chunk

_PIECE = 1 << 24  # logits computed at a time; 8,000 tokens with a vocabulary of 150,000 would take 5 GB in float32


class Scored:
    """The prompt scores of one step while they are copied to the CPU. A target is a prompt token to score.

    Args:
        counts: for each chunk with targets, (number of targets, number of most probable tokens to list with each).
        targets: the token ids of all targets.
        results: the targets' log-probabilities ``[targets]``; their ranks ``[targets]``, 1 for the most probable token;
            if any chunk lists the most probable tokens, their log-probabilities and ids, ``[targets, most]`` each.
    """

    def __init__(self, counts: list[tuple[int, int]], targets: list[int], results: Sequence[Tensor]) -> None:
        self._counts, self._targets, self._results = counts, targets, ToHost(results)

    def wait(self) -> list[list[PromptTokenLogprobs]]:
        """Wait for the device. Return a list of scores for each chunk with targets; NaN if a logit is NaN."""
        logprobs, ranks, *top = self._results.wait()
        found: list[list[PromptTokenLogprobs]] = []
        at = 0
        for count, most in self._counts:
            found.append([])
            for i in range(at, at + count):
                pairs = tuple(zip(top[1][i][:most], top[0][i][:most], strict=True)) if top else ()
                found[-1].append(PromptTokenLogprobs(self._targets[i], logprobs[i], pairs, ranks[i]))
            at += count
        return found


class ScoringForward:
    """The forward pass of a step, which also scores the prompt tokens (targets) that its chunks ask for.

    Args:
        hidden: computes a batch: writes K and V, and returns the last layer's output. See `Llama.hidden`.
    """

    def __init__(self, model: Llama, hidden: Callable[[Batch], Tensor]) -> None:
        self._model, self._hidden = model, hidden
        self._scored: Scored | None = None  # of the last step, until it is taken

    def __call__(self, batch: Batch, chunks: list[ChunkWork], first: int, out: Tensor | None = None) -> Tensor:
        """Compute a batch, and return its logits: see `Llama.forward`. Keep the scores of the targets for `take`.

        ``first`` is the index in the batch of the first token of ``chunks``.
        """
        hidden = self._hidden(batch)
        if any(chunk.targets for chunk in chunks):
            self._scored = score(self._model, hidden, chunks, first)
        return self._model.logits(batch.with_logits(hidden), out)

    def take(self) -> Scored | None:
        """Return the last step's scores and forget them. None if no chunk had targets."""
        scored, self._scored = self._scored, None
        return scored


def add_targets(work: ChunkWork, chunk: Chunk) -> None:
    """Add to ``work`` the prompt tokens that the request wants scored and that ``chunk`` predicts."""
    scores, first = chunk.group.scores, chunk.sequence.num_computed
    if scores is not None and (rows := scores.positions(first, first + chunk.count)):
        work.score_from, work.num_top = rows.start, scores.num_top
        work.targets = chunk.sequence.token_ids[rows.start + 1 : rows.stop + 1]


def score(model: Llama, hidden: Tensor, chunks: list[ChunkWork], first: int) -> Scored | None:
    """Compute the log-probabilities of the chunks' targets. Return None without targets, or on a rank other than 0.

    To limit memory, logits are computed only where needed and for a limited number of rows at a time.

    Args:
        hidden: ``[num_tokens, hidden]``, the last layer's output.
        first: the row of ``hidden`` of the first chunk's first token.
    """
    rows: list[int] = []
    targets: list[int] = []
    counts: list[tuple[int, int]] = []
    for chunk in chunks:
        if chunk.targets:
            at = first + chunk.score_from - chunk.first
            rows += range(at, at + len(chunk.targets))
            targets += chunk.targets
            counts.append((len(chunk.targets), chunk.num_top))
        first += len(chunk.token_ids)
    if not rows:
        return None
    most, size = max(top for _, top in counts), max(1, _PIECE // model.config.vocab_size)
    ranks, device = ranks_of(model), model.device
    pieces = []
    for start in range(0, len(rows), size):
        logits = model.logits(hidden[torch.tensor(rows[start : start + size], device=device)])
        if ranks is None or ranks.rank == 0:
            pieces.append(_score_rows(logits.float(), torch.tensor(targets[start : start + size], device=device), most))
    if not pieces:
        return None
    return Scored(counts, targets, [torch.cat(column) for column in zip(*pieces, strict=True)])


def _score_rows(logits: Tensor, targets: Tensor, most: int) -> tuple[Tensor, ...]:
    """Return the tensors that `Scored` takes as ``results``, from ``logits [n, vocab]`` float32 and ``targets [n]``."""
    results = kernels.log_probabilities(logits, targets), (logits > logits.gather(1, targets[:, None])).sum(-1) + 1
    return (*results, *kernels.top_log_probabilities(logits, min(most, logits.shape[1]))) if most else results
