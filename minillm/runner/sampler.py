"""One step's logits to one step's tokens.

A draw is a `Chunk`: the next token of its sequence, from its row of logits (n samples of a prompt share one row).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import SamplingInputs
from minillm.outputs import TokenLogprobs
from minillm.params import SamplingParams
from minillm.runner.penalties import needs_processing, process_logits
from minillm.sequence import Chunk, SequenceGroup


class Drawn:
    """Tokens that the device has drawn, or is about to; `wait` brings them to the host.

    The log-probabilities are the model's own, before penalties and temperature; NaN where the request asked for none.
    """

    def __init__(
        self,
        draws: SequenceOf[Chunk],
        token_ids: Tensor,
        logprobs: Tensor,
        logits: Tensor,
        *,
        may_run_ahead: bool = False,
    ) -> None:
        """
        Args:
            token_ids: ``[draws]`` int64.
            logprobs: ``[draws]``, of these tokens: NaN where a logit is NaN.
            logits: ``[draws, vocab]``, the model's own, for the most probable tokens where they are wanted.
            may_run_ahead: the next step can be launched before the host has seen these tokens.
        """
        self.may_run_ahead = may_run_ahead
        self._counts = [draw.group.params.logprobs for draw in draws]
        wanted = [i for i, count in enumerate(self._counts) if count is not None]
        vocab = logits.shape[-1]
        most = max((vocab if count < 0 else count for count in self._counts if count is not None), default=0)
        results = [token_ids, logprobs]
        if most:
            index = torch.tensor(wanted, device=logits.device)
            results += kernels.top_log_probabilities(logits[index], min(most, vocab))
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

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None], list[bool]]:
        """The tokens, their log-probabilities where they are wanted, and whether a token's logits held NaN."""
        if self._event is not None:
            self._event.synchronize()
        token_ids, logprobs, *top = [each.tolist() for each in self._results]
        tokens: list[TokenLogprobs | None] = [None] * len(token_ids)
        number = 0
        for i, count in enumerate(self._counts):
            if count is not None:
                end = count if count >= 0 else None
                pairs = tuple(zip(top[1][number][:end], top[0][number][:end], strict=True)) if top else ()
                tokens[i] = TokenLogprobs(token_ids[i], logprobs[i], pairs)
                number += 1
        return token_ids, tokens, [logprob != logprob for logprob in logprobs]


@torch.inference_mode()
def sample_tokens(logits: Tensor, draws: SequenceOf[Chunk]) -> Drawn:
    """Draw one token for each of ``draws`` from ``logits [n, vocab]``."""
    raw = logits
    rows = [draw.row for draw in draws]
    if rows != list(range(len(logits))):
        raw = logits[torch.tensor(rows, device=logits.device)]
    processed = raw
    for i, draw in enumerate(draws):
        if needs_processing(draw.group, draw.sequence):
            if processed is raw:
                processed = raw.to(torch.float32, copy=True)
            process_logits(processed[i], draw.group, draw.sequence)
    token_ids = draw_tokens(processed, draws)
    if all(draw.group.params.logprobs is None for draw in draws):
        return Drawn(draws, token_ids, raw.amax(-1), raw)  # only whether it is NaN has a meaning
    return Drawn(draws, token_ids, kernels.log_probabilities(raw, token_ids), raw)


def draw_tokens(logits: Tensor, draws: SequenceOf[Chunk]) -> Tensor:
    """One token for each row of ``logits [draws, vocab]``, by the requests' parameters: ``[draws]`` int64."""
    params = [sampling_params(draw.group) for draw in draws]
    if all(p.temperature == 0 for p in params):
        return logits.argmax(-1)
    device = logits.device
    inputs = SamplingInputs(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        seeds=torch.tensor([draw.sequence.seed for draw in draws], device=device),
        positions=torch.tensor([draw.sequence.num_tokens for draw in draws], device=device),
    )
    return kernels.sample(logits, inputs)


def sampling_params(group: SequenceGroup) -> SamplingParams:
    """The parameters of a group that samples."""
    assert isinstance(group.params, SamplingParams)
    return group.params
