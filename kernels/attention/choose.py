"""Choose the kernel for the attention of a step's prompt chunks."""

import functools
import warnings
from contextlib import suppress
from types import ModuleType

import torch
from torch import Tensor

from minillm.kernels.arguments import Pages
from minillm.kernels.attention import prefill
from minillm.kernels.compat import has_wgmma
from minillm.kernels.launch import NotCompiledError


def prefill_attention(q: Tensor, pages: Pages, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Compute `reference.prefill_attention`, with Hopper's kernel if it supports the chunks.

    Under `only_compiled`, use the general kernel if Hopper's is not compiled yet, because compiling it takes seconds.
    """
    hopper = _hopper_prefill(q.device)
    if hopper is not None and hopper.takes(q, pages):
        with suppress(NotCompiledError):
            return hopper.prefill_attention(q, pages, cu_seqlens, softmax_scale)
    return prefill.prefill_attention(q, pages, cu_seqlens, softmax_scale)


@functools.cache
def _hopper_prefill(device: torch.device) -> ModuleType | None:
    """Return the module `hopper_prefill` if the GPU is a Hopper, else None. Warn if this Triton cannot import it."""
    if not has_wgmma(device):
        return None
    try:  # Gluon is experimental: other Triton versions may lack parts of it
        from minillm.kernels.attention import hopper_prefill
    except (ImportError, AttributeError) as error:
        warnings.warn(f"long prompts use the general attention kernel: {error}", stacklevel=2)
        return None
    return hopper_prefill
