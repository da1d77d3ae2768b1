"""The ops on a GPU: Triton's, under the names of their contracts in `minillm.kernels.reference`."""

import functools
import warnings
from types import ModuleType

import torch
from torch import Tensor

from minillm.kernels import chunked_prefill
from minillm.kernels.activation import silu_mul
from minillm.kernels.arguments import Pages
from minillm.kernels.beam_rows import choose_beams, fork_rows
from minillm.kernels.blocks import block_copy, gather_blocks, scatter_blocks
from minillm.kernels.compat import has_wgmma
from minillm.kernels.decode_attention import paged_attention
from minillm.kernels.decode_rows import begin_decode, end_decode, penalise
from minillm.kernels.guess_rows import begin_guesses, end_guesses
from minillm.kernels.masks import mask_logits
from minillm.kernels.norm import rms_norm
from minillm.kernels.prefix_decode_attention import prefix_attention
from minillm.kernels.rotary import rotary_write_kv
from minillm.kernels.sampling import log_probabilities, sample, sample_with_logprobs
from minillm.kernels.top_k import top_log_probabilities


def prefill_attention(q: Tensor, pages: Pages, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Choose Hopper's kernel where it takes the chunks, else the general one: see `reference.prefill_attention`."""
    hopper = _hopper_prefill(q.device)
    by = hopper if hopper is not None and hopper.takes(q, pages) else chunked_prefill
    return by.prefill_attention(q, pages, cu_seqlens, softmax_scale)


@functools.cache
def _hopper_prefill(device: torch.device) -> ModuleType | None:
    """Return `minillm.kernels.hopper_prefill` on Hopper; a warning says why this Triton does not have what it needs."""
    if not has_wgmma(device):
        return None
    try:
        from minillm.kernels import hopper_prefill  # Gluon is experimental: another Triton may lack a part of it
    except (ImportError, AttributeError) as error:
        warnings.warn(f"long prompts use the general attention kernel: {error}", stacklevel=2)
        return None
    return hopper_prefill
