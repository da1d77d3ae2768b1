"""Drawn tokens on their way to the CPU, with the log-probabilities that the requests want."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from minillm import kernels
from minillm.outputs import TokenLogprobs
from minillm.runner.to_device import to_device
from minillm.runner.to_host import ToHost
from minillm.sequence import Chunk

MANY = 256  # the most probable tokens that the kernel can find; a sort finds more


class Drawn:
    """Tokens that the device has drawn, or is drawing; `wait` copies them to the CPU.

    Log-probabilities are the model's own, before penalties, grammar and temperature.

    Args:
        token_ids: ``[draws]`` int64, the drawn tokens.
        logprobs: ``[draws]``, their log-probabilities; NaN if a logit is NaN.
        logits: ``[draws, vocab]``, the model's own, to find the most probable tokens if requested.
        listed: log-probabilities and ids ``[draws, listed]`` of the most probable tokens, if already known.
        may_run_ahead, may_compute_ahead: see `minillm.sequence.Flight`.
    """

    def __init__(
        self,
        draws: SequenceOf[Chunk],
        token_ids: Tensor,
        logprobs: Tensor,
        logits: Tensor,
        listed: SequenceOf[Tensor] = (),
        *,
        may_run_ahead: bool,
        may_compute_ahead: bool,
    ) -> None:
        self.may_run_ahead, self.may_compute_ahead = may_run_ahead, may_compute_ahead
        self._counts = [draw.group.params.logprobs for draw in draws]
        vocab, results = logits.shape[-1], [token_ids, logprobs]
        # More than `MANY` tokens are found in another way, which may round differently. Those draws are handled apart,
        # so that a request's results do not depend on other requests.
        self._listed: list[SequenceOf[int]] = [range(len(draws))] if listed else []
        results += listed
        for is_many in (False, True):
            counts = {
                i: vocab if count < 0 else min(count, vocab)
                for i, count in enumerate(self._counts)
                if count and (count < 0 or count > MANY) == is_many
            }
            if counts and (is_many or not listed):
                index = to_device(list(counts), torch.int64, logits.device)
                results += kernels.top_log_probabilities(logits[index], max(counts.values()))
                self._listed.append(list(counts))
        self._results = ToHost(results)

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None], list[bool]]:
        """Wait for the device. Return three lists with an item for each draw.

        They are: the tokens; their log-probabilities (None if not requested); whether the draw's logits had a NaN.
        """
        token_ids, logprobs, *top = self._results.wait()
        best: dict[int, tuple[tuple[int, float], ...]] = {}
        for listed, values, ids in zip(self._listed, top[::2], top[1::2], strict=True):
            rows = zip(listed, ids, values, strict=True)
            best |= {i: tuple(zip(*pair, strict=True)) for i, *pair in rows if self._counts[i]}
        tokens: list[TokenLogprobs | None] = [None] * len(token_ids)
        for i, count in enumerate(self._counts):
            if count is not None:
                end = count if count >= 0 else None
                tokens[i] = TokenLogprobs(token_ids[i], logprobs[i], best.get(i, ())[:end])
        return token_ids, tokens, [logprob != logprob for logprob in logprobs]
