"""Set logits of forbidden tokens to -inf, by a mask of one bit per token. NaN stays, so that the sampler finds it.

Grid: (n, pieces of the vocabulary). Bytes: logits are read and written; in a row with a mask, one more bit per logit is
read.
"""

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import cdiv
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched

_PIECE = 4096  # of the vocabulary per program


@launched
@triton.jit
def _mask_kernel(
    out_ptr, logits_ptr, masks_ptr, words_ptr, out_stride, logits_stride, words_stride, vocab,
    PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    i = tl.program_id(0).to(tl.int64)
    mask = tl.load(masks_ptr + i).to(tl.int64)
    ids = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_id = ids < vocab
    x = tl.load(logits_ptr + i * logits_stride + ids, mask=is_id, other=0.0).to(tl.float32)
    if mask >= 0:
        words = tl.load(words_ptr + mask * words_stride + ids // 32, mask=is_id, other=0)
        may_follow = (words >> (ids % 32)) & 1 == 1
        x = tl.where(may_follow | (x != x), x, float("-inf"))
    tl.store(out_ptr + i * out_stride + ids, x, mask=is_id)


def mask_logits(logits: Tensor, masks: Tensor, words: Tensor, out: Tensor) -> None:
    """Write the logits to ``out``, with -inf for forbidden tokens: see `reference.mask_logits`."""
    n, vocab = logits.shape
    _mask_kernel[(n, cdiv(vocab, _PIECE))](
        out, logits, masks, words, out.stride(0), logits.stride(0), words.stride(0), vocab,
        PIECE=_PIECE, num_warps=8, **pdl_options(logits.device),
    )  # fmt: skip
