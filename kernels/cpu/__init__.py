"""The ops on a CPU: fast functions for some ops, and `minillm.kernels.reference` for all other ops."""

from minillm.kernels.cpu.attention import (
    HostPlan,
    PaddedDecodes,
    paged_attention,
    plan_step,
    prefill_attention,
    prefix_attention,
    rotary_write_kv,
)
from minillm.kernels.cpu.linear import (
    PackedLinear,
    float16_scales,
    gelu_mul,
    norm_add,
    packed_linear,
    rms_norm,
    silu_mul,
)
from minillm.kernels.cpu.low_bit import Rows, packed_int4, packed_int8
from minillm.kernels.cpu.sampling import mask_logits, sample, sample_with_logprobs, top_log_probabilities
from minillm.kernels.decode_state.reference import begin_decode, choose_beams, end_decode, fork_rows, penalize
from minillm.kernels.reference import block_copy, gather_blocks, log_probabilities, scatter_blocks
