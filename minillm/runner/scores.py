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

_PIECE = 1 << 24  # logits at a time: of 8,000 tokens and a vocabulary of 150,000 all would be 5 GB in float32


class Scored:
    """The scores of one step's chunks, on their way to the host.

    Args:
        counts: of each chunk with targets, how many it has, and how many most probable tokens it wants beside each.
        results: log-probabilities ``[targets]``, ranks ``[targets]`` from 1 on, and where any are wanted the most
            probable tokens' log-probabilities and ids ``[targets, most]``.
    """

    def __init__(self, counts: list[tuple[int, int]], targets: list[int], results: Sequence[Tensor]) -> None:
        self._counts, self._targets, self._results = counts, targets, ToHost(results)

    def wait(self) -> list[list[PromptTokenLogprobs]]:
        """Return the scores of each chunk with targets, by target; NaN if a logit is NaN."""
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
    """The forward pass of a step's batch, which also scores the targets of its chunks.

    Args:
        hidden: writes K and V of a batch's tokens, and returns the last layer's output: `Llama.hidden`.
    """

    def __init__(self, model: Llama, hidden: Callable[[Batch], Tensor]) -> None:
        self._model, self._hidden = model, hidden
        self._scored: Scored | None = None  # of the last step, until it is taken

    def __call__(self, batch: Batch, chunks: list[ChunkWork], first: int, out: Tensor | None = None) -> Tensor:
        """Compute a batch; see `Llama.forward`. ``first``: the batch's token at which ``chunks`` begin."""
        hidden = self._hidden(batch)
        if any(chunk.targets for chunk in chunks):
            self._scored = score(self._model, hidden, chunks, first)
        return self._model.logits(hidden, batch.logit_rows, out)

    def take(self) -> Scored | None:
        """Return the scores of the last step's chunks with targets, in their order, once."""
        scored, self._scored = self._scored, None
        return scored


def add_targets(work: ChunkWork, chunk: Chunk) -> None:
    """Add the prompt tokens that a request wants scored, as far as the chunk gives them."""
    scores, first = chunk.group.scores, chunk.sequence.num_computed
    if scores is not None and (rows := scores.positions(first, first + chunk.count)):
        work.score_from, work.num_top = rows.start, scores.num_top
        work.targets = chunk.sequence.token_ids[rows.start + 1 : rows.stop + 1]


def score(model: Llama, hidden: Tensor, chunks: list[ChunkWork], first: int) -> Scored | None:
    """Compute the log-probabilities of the chunks' targets; return None without targets, and on ranks but the first.

    Logits are computed only for these rows, a piece at a time.

    Args:
        hidden: ``[num_tokens, hidden]``, the last layer's output.
        first: the row of the first chunk's first token.
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
        logits = model.logits(hidden, torch.tensor(rows[start : start + size], device=device))
        if ranks is None or ranks.rank == 0:
            pieces.append(_score_rows(logits.float(), torch.tensor(targets[start : start + size], device=device), most))
    if not pieces:
        return None
    return Scored(counts, targets, [torch.cat(column) for column in zip(*pieces, strict=True)])


def _score_rows(logits: Tensor, targets: Tensor, most: int) -> tuple[Tensor, ...]:
    """Return the results of `Scored` for ``logits [n, vocab]`` float32 and ``targets [n]``."""
    results = kernels.log_probabilities(logits, targets), (logits > logits.gather(1, targets[:, None])).sum(-1) + 1
    return (*results, *kernels.top_log_probabilities(logits, min(most, logits.shape[1]))) if most else results
