"""The ops on a CPU, fast: the same contracts as `minillm.kernels.reference`, which stays the specification."""

from minillm.kernels.cpu.attention import (
    HostPlan,
    Together,
    paged_attention,
    plan_step,
    prefill_attention,
    rotary_write_kv,
)
from minillm.kernels.cpu.linear import PackedLinear, fits_float16, packed_linear, rms_norm, silu_mul
from minillm.kernels.cpu.sampling import sample, top_log_probabilities

__all__ = [
    "HostPlan",
    "PackedLinear",
    "Together",
    "fits_float16",
    "packed_linear",
    "paged_attention",
    "plan_step",
    "prefill_attention",
    "rms_norm",
    "rotary_write_kv",
    "sample",
    "silu_mul",
    "top_log_probabilities",
]
