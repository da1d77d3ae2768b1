"""The sampler on a CPU. It sorts only the thousand most probable tokens, and all tokens only if a draw needs more."""

import numpy as np
import torch
from torch import Tensor

from minillm.kernels import reference
from minillm.kernels.arguments import SamplingInputs

_CANDIDATES = 1024  # tokens considered before falling back to the whole vocabulary


def mask_logits(logits: Tensor, masks: Tensor, words: Tensor, out: Tensor) -> None:
    """Compute `reference.mask_logits`, twice as fast. If ``out`` is ``logits``, rows without a mask cost nothing."""
    if out is not logits:
        out.copy_(logits)
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    for row, mask in enumerate(masks.tolist()):
        if mask >= 0:
            banned = torch.from_numpy(bits[mask, : out.shape[1]]) == 0
            out[row].masked_fill_(banned.logical_and_(out[row] == out[row]), float("-inf"))


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Compute `reference.sample`, with the same tokens."""
    token_ids = logits.argmax(-1)
    drawn = inputs.temperature > 0
    truncated = drawn & ((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0))
    plain = drawn & ~truncated
    if bool(plain.any()):
        rows = plain.nonzero()[:, 0]
        temperature, *_, seeds, positions = inputs.rows(rows)
        ids = torch.arange(logits.shape[1], dtype=torch.int32)[None]
        scaled = logits[rows]
        scaled.sub_(scaled.gather(1, token_ids[rows, None]))  # the largest is 0 now, so nothing overflows
        scaled.div_(temperature[:, None])
        token_ids[rows] = (scaled + reference.gumbel(seeds, positions, ids)).argmax(-1)
    if bool(truncated.any()):
        rows = truncated.nonzero()[:, 0]
        some, inputs = logits[rows], inputs.rows(rows)
        chosen, sure = _sample_candidates(some, inputs)
        if not bool(sure.all()):
            unsure = (~sure).nonzero()[:, 0]
            chosen[unsure] = reference.sample(some[unsure], inputs.rows(unsure))
        token_ids[rows] = chosen
    return token_ids


def sample_with_logprobs(logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    """Compute `reference.sample_with_logprobs`."""
    tokens = sample(logits.float(), inputs)
    return tokens, reference.log_probabilities(logits, tokens)


def _sample_candidates(logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    """Draw from the largest logits of each row only.

    Returns: token ids ``[rows]`` int64; for each row, whether a draw from all logits is certain to give the same token.
    """
    temperature, top_k, top_p, min_p, seeds, positions = inputs
    vocab = logits.shape[1]
    wanted = torch.where(top_k > 0, top_k, _CANDIDATES)
    count = min(vocab, int(wanted.max()) + 1)  # one more than top-k keeps, to detect equal values at the cut
    values, ids = _largest(logits, count)
    scaled = (values - values[:, :1]) / temperature[:, None]

    rank = torch.arange(count)
    kept = rank < torch.where(top_k > 0, top_k, vocab)[:, None]
    last = (kept.sum(-1) - 1).clamp_(min=0)[:, None]
    beyond = (last + 1).clamp_(max=count - 1)
    tied = (values.gather(1, last) == values.gather(1, beyond)) & (last + 1 < count)
    sure = (top_k > 0) & ~tied[:, 0]

    all_scaled = (logits - values[:, :1]) / temperature[:, None]
    total = torch.where(top_k > 0, scaled.masked_fill(~kept, float("-inf")).logsumexp(-1), all_scaled.logsumexp(-1))
    probabilities = (scaled - total[:, None]).exp()
    before = probabilities.cumsum(-1) - probabilities
    cut = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0)
    cut |= scaled < torch.log(min_p)[:, None]
    # If the last candidate and all candidates equal to it are cut, all later tokens are cut as well. (`topk` may return
    # any of several equal values.)
    tail_is_cut = (cut | (values != values[:, -1:])).all(-1)
    sure |= ((top_k == 0) & tail_is_cut) | (count == vocab)
    score = scaled + reference.gumbel(seeds, positions, ids.to(torch.int32))
    choice = score.masked_fill(~kept | cut, float("-inf")).argmax(-1, keepdim=True)
    return ids.gather(1, choice)[:, 0], sure


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest logits of each row and their ids, lower id first among equals.

    If several logits equal the smallest returned logit, it is arbitrary which of their ids are returned.
    """
    values, ids = logits.topk(count)
    ids, by_id = ids.sort(-1)
    values, order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def top_log_probabilities(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `reference.top_log_probabilities` without sorting the vocabulary."""
    values, ids = _largest(logits, count)
    equal = values == values[:, -1:]
    more = (logits == values[:, -1:]).sum(-1) > equal.sum(-1)
    for row in more.nonzero()[:, 0].tolist():  # more tokens equal the last one: those with the lowest ids count
        ids[row, equal[row]] = (logits[row] == values[row, -1]).nonzero()[: int(equal[row].sum()), 0]
    return values - logits.logsumexp(-1, keepdim=True), ids
