"""One step's logits to one step's tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import SamplingInputs
from minillm.outputs import TokenLogprobs
from minillm.params import SamplingParams
from minillm.runner.penalties import needs_processing, process_logits
from minillm.sequence import Sequence


@dataclass(slots=True)
class SampleRow:
    """One draw: the next token of ``sequence`` from row ``logits_row`` (n samples of a prompt share one row)."""

    params: SamplingParams
    sequence: Sequence
    logits_row: int
    end_ids: tuple[int, ...]  # tokens that would end the completion


class Drawn:
    """Tokens that the device has drawn, or is about to; `wait` brings them to the host.

    The log-probabilities are the model's own, before penalties and temperature; NaN where the request asked for none.
    """

    def __init__(self, rows: SequenceOf[SampleRow], token_ids: Tensor, logprobs: Tensor, logits: Tensor) -> None:
        """
        Args:
            token_ids: ``[rows]`` int64; logprobs ``[rows]``, of these tokens: NaN where a logit is NaN.
            logits: ``[rows, vocab]``, the model's own, for the most probable tokens where they are wanted.
        """
        self._rows = rows
        self._wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        most = max((rows[i].params.logprobs or 0 for i in self._wanted), default=0)
        results = [token_ids, logprobs]
        if most:
            index = torch.tensor(self._wanted, device=logits.device)
            results += kernels.top_log_probabilities(logits[index], min(most, logits.shape[1]))
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            # Into pinned memory of this draw's own: the next one may be under way before these are looked at.
            results = [
                torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
                for each in results
            ]
            self._event = torch.cuda.Event()
            self._event.record()
        self._results = results

    def wait(self) -> tuple[list[TokenLogprobs], list[bool]]:
        """The tokens, and of each whether its logits held NaN."""
        if self._event is not None:
            self._event.synchronize()
        token_ids, logprobs, *top = [each.tolist() for each in self._results]
        tokens = [TokenLogprobs(token_id, float("nan")) for token_id in token_ids]
        for number, i in enumerate(self._wanted):
            count = self._rows[i].params.logprobs
            pairs = tuple(zip(top[1][number][:count], top[0][number][:count], strict=True)) if top else ()
            tokens[i] = TokenLogprobs(token_ids[i], logprobs[i], pairs)
        return tokens, [logprob != logprob for logprob in logprobs]


@torch.inference_mode()
def sample_tokens(logits: Tensor, rows: SequenceOf[SampleRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row of ``rows`` from ``logits [n, vocab]``.

    Returns:
        What `Drawn` takes: token ids ``[rows]`` int64, their log-probabilities, and their rows of logits. Where nobody
        wants the log-probabilities only whether they are NaN has a meaning.
    """
    raw = logits
    if [row.logits_row for row in rows] != list(range(len(logits))):
        raw = logits[torch.tensor([row.logits_row for row in rows], device=logits.device)]
    processed = raw
    for i, row in enumerate(rows):
        if needs_processing(row.params, row.sequence):
            if processed is raw:
                processed = raw.to(torch.float32, copy=True)
            process_logits(processed[i], row.params, row.sequence, row.end_ids)
    token_ids = draw(processed, rows)
    if all(row.params.logprobs is None for row in rows):
        return token_ids, raw.amax(-1), raw
    return token_ids, kernels.log_probabilities(raw, token_ids), raw


def draw(logits: Tensor, rows: SequenceOf[SampleRow]) -> Tensor:
    """One token per row of ``logits [rows, vocab]``, drawn by the requests' parameters: ``[rows]`` int64."""
    params = [row.params for row in rows]
    if all(p.temperature == 0 for p in params):
        return logits.argmax(-1)
    device = logits.device
    inputs = SamplingInputs(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        seeds=torch.tensor([row.sequence.seed for row in rows], device=device),
        positions=torch.tensor([row.sequence.num_tokens for row in rows], device=device),
    )
    return kernels.sample(logits, inputs)
