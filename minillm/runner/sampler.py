"""Draw tokens from logits. A draw is given as a `Chunk`: its sequence's next token is drawn from row ``chunk.row``."""

from collections.abc import Sequence as SequenceOf
from functools import partial

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import SamplingInputs
from minillm.params import SamplingParams
from minillm.runner.drawn import Drawn
from minillm.runner.penalties import needs_processing, note_empty, process_logits
from minillm.runner.to_device import to_device
from minillm.sequence import Chunk


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
