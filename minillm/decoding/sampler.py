"""One step's logits to one step's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from minillm.decoding.params import SamplingParams
from minillm.decoding.processors import needs_processing, process_logits
from minillm.outputs import TokenLogprobs
from minillm.sequence import Sequence


@dataclass(slots=True)
class SampleRow:
    """One draw: the next token of ``sequence`` from row ``logits_row`` (n samples of a prompt share one row)."""

    params: SamplingParams
    sequence: Sequence
    logits_row: int
    end_ids: tuple[int, ...]  # tokens that would end the completion


@torch.inference_mode()
def sample_tokens(logits: Tensor, rows: list[SampleRow]) -> list[TokenLogprobs]:
    """Draw one token per row of ``rows`` from ``logits [n, vocab]`` float32.

    The log-probabilities are the model's own, before penalties and temperature; NaN where the request asked for none.
    """
    raw = logits
    if [row.logits_row for row in rows] != list(range(len(logits))):
        raw = logits[torch.tensor([row.logits_row for row in rows], device=logits.device)]
    processed = raw
    for i, row in enumerate(rows):
        if needs_processing(row.params, row.sequence):
            if processed is raw:
                processed = raw.clone()
            process_logits(processed[i], row.params, row.sequence, row.end_ids)
    chosen = _draw(processed, rows)
    token_ids = chosen.tolist()
    results = [TokenLogprobs(token_id, float("nan")) for token_id in token_ids]
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if wanted:
        index = torch.tensor(wanted, device=logits.device)
        log_probs = raw[index].log_softmax(-1)
        picked = log_probs.gather(1, chosen[index, None])[:, 0].tolist()
        most = max(rows[i].params.logprobs or 0 for i in wanted)
        values, ids = log_probs.topk(min(most, log_probs.shape[1]))
        for i, logprob, row_values, row_ids in zip(wanted, picked, values.tolist(), ids.tolist(), strict=True):
            count = rows[i].params.logprobs
            results[i] = TokenLogprobs(
                token_ids[i], logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True))
            )
    return results


def _draw(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """``[rows]`` int64 token ids."""
    params = [row.params for row in rows]
    if all(p.temperature == 0 for p in params):
        return logits.argmax(-1)
    device = logits.device
    return kernels.sample(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.top_k for p in params], device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        torch.tensor([row.sequence.seed for row in rows], device=device),
        torch.tensor([len(row.sequence.token_ids) for row in rows], device=device),
    )
