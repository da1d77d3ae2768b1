"""Draw tokens from logits. A draw is given as a `Chunk`: its sequence's next token is drawn from row ``chunk.row``."""

from collections.abc import Sequence as SequenceOf
from functools import partial

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import SamplingInputs
from minillm.outputs import TokenLogprobs
from minillm.params import SamplingParams
from minillm.runner.penalties import needs_processing, note_empty, process_logits
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


@torch.inference_mode()
def sample_tokens(logits: Tensor, draws: SequenceOf[Chunk]) -> Drawn:
    """Apply the requests' parameters to ``logits [n, vocab]``, and draw one token for each of ``draws``."""
    raw = logits
    rows = [draw.row for draw in draws]
    if rows != list(range(len(logits))):
        raw = logits[to_device(rows, torch.int64, logits.device)]
    processed, owners = raw, [(draw.group, draw.sequence) for draw in draws]
    if any(needs_processing(*owner) for owner in owners):
        processed = raw.to(torch.float32, copy=True)
        note_empty(owners, process_logits(processed, owners))
    token_ids = draw_tokens(processed, draws)
    wanted = any(draw.group.params.logprobs is not None for draw in draws)  # otherwise only to detect NaN
    logprobs = kernels.log_probabilities(raw, token_ids) if wanted else raw.amax(-1)
    return Drawn(draws, token_ids, logprobs, raw, may_run_ahead=False, may_compute_ahead=False)


def draw_tokens(logits: Tensor, draws: SequenceOf[Chunk]) -> Tensor:
    """Draw a token for each row of ``logits [draws, vocab]`` by the requests' parameters. Return ``[draws]`` int64."""
    params = [draw.group.params for draw in draws if isinstance(draw.group.params, SamplingParams)]
    if all(p.temperature == 0 for p in params):
        return logits.argmax(-1)
    numbers = partial(to_device, dtype=torch.float32, device=logits.device)
    wholes = partial(to_device, dtype=torch.int64, device=logits.device)
    inputs = SamplingInputs(
        temperature=numbers([p.temperature for p in params]),
        top_k=wholes([p.top_k for p in params]),
        top_p=numbers([p.top_p for p in params]),
        min_p=numbers([p.min_p for p in params]),
        seeds=wholes([draw.sequence.seed for draw in draws]),
        positions=wholes([draw.sequence.num_tokens for draw in draws]),
    )
    return kernels.sample(logits, inputs)
