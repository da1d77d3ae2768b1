"""Changes of logits that depend on a sequence's own history: biases, penalties, tokens not allowed yet."""

import torch
from torch import Tensor

from minillm.params import LogitsProcessor
from minillm.sequence import Sequence, SequenceGroup

NO_TOKEN = "no token is possible any more: together the request's parameters exclude all of them"


def needs_processing(group: SequenceGroup, sequence: Sequence) -> bool:
    """Whether `process_logits` would change anything at this step."""
    return group.params.has_penalties or needs_host(group, sequence)


def needs_host(group: SequenceGroup, sequence: Sequence) -> bool:
    """Whether this step needs more than the penalties that `minillm.kernels.penalise` applies on the device."""
    params = group.params
    changes = params.logit_bias or group.bad_words or params.no_repeat_ngram_size or sequence.matcher is not None
    changes = changes or group.allowed_ids is not None or params.logits_processor is not None
    return bool(changes) or sequence.num_output_tokens < params.min_tokens


def process_logits(logits: Tensor, group: SequenceGroup, sequence: Sequence) -> None:
    """Apply a request's biases and penalties to the ``[vocab]`` logits of one sequence's next token, in place.

    In this order: logit bias, end tokens before ``min_tokens``, repetition, frequency and presence penalty, tokens that
    would repeat an n-gram, tokens that would complete one of the bad words, tokens that are not among the allowed ones,
    the caller's own processor; if that fails, ``group.error`` says why. Then comes the grammar, which decides about end
    tokens too, for all sequences at once: `minillm.runner.masks`. Beam search applies them to log-probabilities
    instead, as Hugging Face ``generate`` does.
    """
    params, end_ids = group.params, group.end_ids
    device = logits.device
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=device)
    if end_ids and sequence.num_output_tokens < params.min_tokens and sequence.matcher is None:
        logits[torch.tensor(end_ids, device=device)] = float("-inf")
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sequence.token_ids, device=device).unique()
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.frequency_penalty or params.presence_penalty) and sequence.num_output_tokens:
        ids, counts = torch.tensor(sequence.output_token_ids, device=device).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    banned = repeating_tokens(sequence.token_ids, params.no_repeat_ngram_size) if params.no_repeat_ngram_size else []
    banned += completing_tokens(sequence.token_ids, group.bad_words)
    if banned:
        logits[torch.tensor(banned, device=device)] = float("-inf")
    if group.allowed_ids is not None:
        allowed = group.allowed_ids.to(device)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
    if params.logits_processor is not None:
        group.error = group.error or run_processor(params.logits_processor, logits, sequence)


def process_draw(logits: Tensor, group: SequenceGroup, sequence: Sequence) -> None:
    """`process_logits` for a draw, which needs a possible token: where none is left, ``group.error`` says so."""
    process_logits(logits, group, sequence)
    if group.allowed_ids is not None and group.error is None and logits.amax() == float("-inf"):
        group.error = NO_TOKEN


def run_processor(processor: LogitsProcessor, logits: Tensor, sequence: Sequence) -> str | None:
    """Replace the ``[vocab]`` logits of a sequence's next token by the caller's. Returns what failed, in a line."""
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    if logits.isnan().any():
        return None  # the model's own fault, and told as such
    try:
        changed = processor(prompt, sequence.output_token_ids, logits.clone())
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            what = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            return f"logits_processor must return a tensor {list(logits.shape)}, not {what}"
        if not changed.amax().isfinite():
            return "logits_processor has left NaN, infinity, or no token that is possible"
        logits.copy_(changed)
    except Exception as error:
        return f"logits_processor: {type(error).__name__}: {' '.join(str(error).split())}"
    return None


def repeating_tokens(token_ids: list[int], size: int) -> list[int]:
    """The tokens that would make the last ``size`` tokens a run that occurred before."""
    if len(token_ids) < size:
        return []
    if size == 1:
        return list(dict.fromkeys(token_ids))
    starts, tail = range(len(token_ids) - size + 1), token_ids[len(token_ids) - size + 1 :]
    found = [i for i in starts if token_ids[i] == tail[0] and token_ids[i : i + size - 1] == tail]
    return [token_ids[i + size - 1] for i in found]


def completing_tokens(token_ids: list[int], words: tuple[tuple[int, ...], ...]) -> list[int]:
    """The tokens that would complete one of ``words``, given as runs of token ids."""
    return [word[-1] for word in words if len(word) == 1 or tuple(token_ids[1 - len(word) :]) == word[:-1]]
