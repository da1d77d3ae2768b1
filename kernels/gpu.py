"""The ops on a GPU: Triton's, under the names of their contracts in `minillm.kernels.reference`."""

from minillm.kernels.activation import silu_mul
from minillm.kernels.beam_rows import choose_beams, fork_rows
from minillm.kernels.blocks import block_copy, gather_blocks, scatter_blocks
from minillm.kernels.chunked_prefill import prefill_attention
from minillm.kernels.decode_attention import paged_attention
from minillm.kernels.decode_rows import begin_decode, end_decode, penalise
from minillm.kernels.guess_rows import begin_guesses, end_guesses
from minillm.kernels.masks import mask_logits
from minillm.kernels.norm import rms_norm
from minillm.kernels.prefix_decode_attention import prefix_attention
from minillm.kernels.rotary import rotary_write_kv
from minillm.kernels.sampling import log_probabilities, sample, sample_with_logprobs
from minillm.kernels.top_k import top_log_probabilities
