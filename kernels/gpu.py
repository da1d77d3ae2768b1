"""The ops on a GPU: Triton functions with the names of their contracts in `minillm.kernels.reference`."""

from minillm.kernels.attention.choose import prefill_attention
from minillm.kernels.attention.decode import paged_attention
from minillm.kernels.attention.shared import prefix_attention
from minillm.kernels.cache.blocks import block_copy, gather_blocks, scatter_blocks
from minillm.kernels.cache.rotary import rotary_write_kv
from minillm.kernels.decode_state.beams import choose_beams, fork_rows
from minillm.kernels.decode_state.decode import begin_decode, end_decode, penalize
from minillm.kernels.norm.activation import gelu_mul, silu_mul
from minillm.kernels.norm.rms_norm import norm_add, rms_norm
from minillm.kernels.sampling.draw import log_probabilities, sample, sample_with_logprobs
from minillm.kernels.sampling.masks import mask_logits
from minillm.kernels.sampling.top_k import top_log_probabilities
