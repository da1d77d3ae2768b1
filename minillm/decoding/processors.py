"""Changes of logits that depend on a sequence's own history: biases, penalties, tokens not allowed yet."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.decoding.params import SamplingParams
from minillm.sequence import Sequence


def needs_processing(params: SamplingParams, sequence: Sequence) -> bool:
    """Whether `process_logits` would change anything at this step."""
    return params.changes_logits or sequence.num_output_tokens < params.min_tokens


def process_logits(logits: Tensor, params: SamplingParams, sequence: Sequence, end_ids: tuple[int, ...]) -> None:
    """Apply a request's biases and penalties to the ``[vocab]`` logits of one sequence's next token, in place.

    In this order: logit bias, end tokens before ``min_tokens``, repetition, frequency and presence penalty.

    Args:
        end_ids: the tokens that would end the completion.
    """
    device = logits.device
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=device)
    if end_ids and sequence.num_output_tokens < params.min_tokens:
        logits[torch.tensor(end_ids, device=device)] = float("-inf")
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sequence.token_ids, device=device).unique()
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.frequency_penalty or params.presence_penalty) and sequence.num_output_tokens:
        ids, counts = torch.tensor(sequence.output_token_ids, device=device).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
