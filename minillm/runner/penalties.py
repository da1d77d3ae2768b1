"""Change logits as requests ask: bias, penalties, banned tokens, and the request's own logits processor."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from minillm.errors import RequestError
from minillm.kernels.decode_state.reference import penalized
from minillm.params import LogitsProcessor
from minillm.runner.masks import Masks, masks_of, needs_mask
from minillm.sequence import Sequence, SequenceGroup

NOTHING_ALLOWED = RequestError(
    "no token is possible any more: together the request's parameters exclude all of them", is_usage=True
)
_NOTHING_LEFT = RequestError("logits_processor has left NaN, infinity, or no token that is possible")
Owner = tuple[SequenceGroup, Sequence]  # the group and sequence that a row of logits predicts the next token of


def needs_processing(group: SequenceGroup, sequence: Sequence) -> bool:
    """Return whether `process_logits` would change anything in this step."""
    params = group.params
    changes = params.has_penalties or params.logit_bias or params.logits_processor is not None
    return bool(changes) or needs_mask(group, sequence)


def process_logits(logits: Tensor, owners: SequenceOf[Owner]) -> Masks:
    """Apply the requests' parameters to ``logits [n, vocab]`` in place. Row i predicts the next token of owner i.

    The order is: logit bias; repetition, frequency and presence penalty; banned tokens; the caller's own processor.
    Beam search applies these to log-probabilities instead of logits, as Hugging Face ``generate`` does.

    Returns:
        The masks of the allowed tokens.
    """
    masks = masks_of(owners, logits.shape[1], logits.device)  # while the device computes the logits
    for row, (group, sequence) in enumerate(owners):
        if group.params.has_penalties or group.params.logit_bias:
            _penalize(logits[row], group, sequence)
    masks.apply(logits)
    if masks.forced:  # a forced token costs a beam nothing; NaN stays
        at = list(masks.forced), list(masks.forced.values())
        logits[at] = logits[at].clamp(0, 0)
    run_processors(logits, owners, masks)
    return masks


def run_processors(logits: Tensor, owners: SequenceOf[Owner], masks: Masks) -> None:
    """Run the requests' own logits processors. Banned tokens stay banned. If a processor fails, its group fails."""
    processed = []
    for row, (group, sequence) in enumerate(owners):
        processor = group.params.logits_processor
        if processor is not None and group.error is None and row not in masks.empty and row not in masks.forced:
            group.error = _run(processor, logits[row], sequence)
            processed.append(row)
    if processed:
        masks.apply(logits)
    for row in processed:
        group, _ = owners[row]
        if group.error is None and logits[row].amax() == float("-inf"):
            group.error = _NOTHING_LEFT


def note_empty(owners: SequenceOf[Owner], masks: Masks) -> None:
    """Set the error of groups that have no allowed token."""
    for row in masks.empty:
        group, _ = owners[row]
        group.error = group.error or NOTHING_ALLOWED


def _penalize(logits: Tensor, group: SequenceGroup, sequence: Sequence) -> None:
    """Apply biases and penalties to the ``[vocab]`` logits of one sequence's next token, in place."""
    params, device = group.params, logits.device
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=device)
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    tokens = sequence.output_token_ids if penalties[0] == 1.0 else sequence.token_ids
    if params.has_penalties and tokens:
        ids, inverse = torch.tensor(tokens, device=device).unique(return_inverse=True)
        generated = inverse[len(tokens) - sequence.num_output_tokens :].bincount(minlength=len(ids))
        logits[ids] = penalized(logits[ids], generated, *penalties)


def _run(processor: LogitsProcessor, logits: Tensor, sequence: Sequence) -> RequestError | None:
    """Replace the ``[vocab]`` logits of a sequence's next token by the result of ``processor``.

    Return the error, or None.
    """
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    if logits.isnan().any():
        return None  # the model's own error, reported elsewhere
    try:
        changed = processor(prompt, sequence.output_token_ids, logits.clone())
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            what = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            return RequestError(f"logits_processor must return a tensor {list(logits.shape)}, not {what}")
        if not changed.amax().isfinite():
            return _NOTHING_LEFT
        logits.copy_(changed)
    except Exception as error:
        return RequestError(f"logits_processor: {type(error).__name__}: {' '.join(str(error).split())}")
    return None
