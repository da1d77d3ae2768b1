"""The memory of a device, divided among weights, steps and context: the arithmetic of `loading.build`.

A GPU is filled up to ``gpu_memory_utilization``. On a CPU the context gets half of the memory that the weights leave,
and at most `CPU_POOL_TOKENS`, because other programs need memory as well.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace

from minillm.config import EngineConfig
from minillm.fit.weights import Layout, Weights
from minillm.progress import size
from minillm.storage import Storage
from minillm.weights.shape import Shape

CPU_KEEPS_LOW_BIT = False  # a CPU's default matmuls need dequantized weights
CPU_DEQUANTIZED_SHARE = 0.5  # maximum share of the free memory for dequantized weights, which speed up prompts
CPU_POOL_TOKENS, CPU_POOL_SHARE = 32768, 0.5
CPU_STEP_TOKENS = 512  # about one second for a 135M model
GPU_STEP_TOKENS = (8192, 4096, 2048, 1024, 512)
_COPY_SHARE = 1 / 4  # maximum share of the available memory for a 16-bit copy of low-bit weights
_GPU_STEP_SHARE = 1 / 3  # maximum share of the memory after weights for a step: smaller steps leave more context
GRAPH_BYTES = 512 << 20  # CUDA graphs, cuBLAS's workspace, and allocator overhead
# Memory of a process before its first tensor: CUDA's context and the compiled kernels, or torch's libraries.
GPU_PROCESS_BYTES, CPU_PROCESS_BYTES = 512 << 20, 384 << 20
_PACKING = ("x86_64", "AMD64")  # processors on which `kernels.cpu.packed_linear` keeps matrices in float16
_CPU_BYTES = 64 << 20  # allocator overhead
LEAST_TOKENS, CONVERSATION_TOKENS = 512, 4096  # context lengths: the minimum, and enough for a conversation

# A step reads weights and KV cache at this share of the measured bandwidth. (Measured: 0.88 to 1.0 of a GPU's copy
# bandwidth with 16-bit weights, 0.8 of a CPU's read bandwidth.) A GPU also needs a fixed time per layer. With
# `minillm bench latency` an H200 took 445 us for 30 layers with 0.3 GB of weights, 840 us for 16 layers with 2.5 GB,
# and 4,000 us for 32 layers with 15 GB.
EFFICIENCY = 0.85
_GPU_SECONDS_PER_LAYER = 13e-6


@dataclass(frozen=True)
class Fit:
    """The memory that a model needs on a device, and the context that fits."""

    weights: Weights
    copied: int  # bytes of a 16-bit copy of low-bit weights; 0 without one
    steps: int  # bytes of activations, logits and graphs
    least_context: int  # bytes of the shortest useful context
    needed: int  # bytes in all, with the shortest useful context
    context: int  # tokens of context that fit, up to the model's limit; 0 if the model does not fit
    fits: bool
    fits_conversation: bool  # the context is long enough for a conversation, or reaches the model's limit


@dataclass(frozen=True)
class Budget:
    """A device's memory, and the options of `EngineConfig` that divide it.

    The weights, the steps, the context and a draft model share ``available`` bytes. ``free`` and ``total`` are also in
    bytes. ``element_size`` is the number of bytes of an element in the engine's dtype.
    """

    free: int
    total: int
    on_gpu: bool
    element_size: int
    config: EngineConfig
    draft_bytes: int = 0  # memory of a draft model without its KV cache
    draft_bytes_per_token: int = 0  # memory of a draft model's KV cache per token

    def with_draft(self, draft: Weights, shape: Shape) -> Budget:
        """Return this budget with the memory of a draft model reserved."""
        own = draft.memory + (GRAPH_BYTES if self.on_gpu else 0)
        return replace(self, draft_bytes=own, draft_bytes_per_token=self.kv_bytes_per_token(shape))

    @property
    def available(self) -> int:
        kept = self.total * (1 - self.config.gpu_memory_utilization) if self.on_gpu else 0
        return max(0, int(self.free - kept))

    def layout(self, quantize: str = "") -> Layout:
        """Return how the engine stores weights in memory. A nonempty ``quantize`` replaces the engine's option."""
        asked = quantize or self.config.quantize or ""
        in_float32_on_cpu = not self.on_gpu and self.element_size == 4
        packs = in_float32_on_cpu and platform.machine() in _PACKING
        return Layout(self.element_size, packs, asked, self._storage(packs))

    @property
    def chooses_weights(self) -> bool:
        """Return whether the engine itself decides if it dequantizes low-bit matrices, from model size and free memory.

        It does so on a CPU if the option ``weights`` is "auto".
        """
        return self.config.weights == "auto" and not self.on_gpu and not CPU_KEEPS_LOW_BIT

    @property
    def most_dequantized(self) -> int:
        """Maximum bytes that dequantized weights may take. If `chooses_weights`, a larger model stays low-bit."""
        return int((self.available - self.draft_bytes) * CPU_DEQUANTIZED_SHARE)

    def with_weights(self, weights: str) -> Budget:
        """Return this budget with another value of the option ``weights``."""
        return replace(self, config=replace(self.config, weights=weights))

    def _storage(self, packs: bool) -> Storage:
        weights = self.config.weights
        if self.on_gpu or CPU_KEEPS_LOW_BIT:
            return "stored" if weights in ("auto", "stored", "both") else "expanded"
        if packs and weights == "int8":
            return "int8"
        return "int4" if packs and weights == "stored" else "expanded"

    def keeps_copy(self, weights: Weights, shape: Shape) -> bool:
        """Return whether the engine, on a GPU, keeps a 16-bit copy of low-bit weights next to the low-bit weights.

        The option ``weights`` asks for a copy with "both". With "auto" a copy is kept if there is enough memory. In
        deterministic mode no copy is kept, because the free memory must not decide which kernel computes a result.
        """
        if self.config.deterministic:
            return False
        if self.config.weights != "auto" or not self.on_gpu:
            return self.on_gpu and self.config.weights == "both" and weights.copied > 0
        memory = weights.memory + weights.copied + self.draft_bytes
        pool = (self.config.num_blocks or 0) * self.config.block_size
        tokens = max(min(self.config.max_model_len or CONVERSATION_TOKENS, shape.context), pool)
        left = self.available - memory
        steps = self.step_bytes(shape, self.step_tokens(shape, left), left)
        needed = memory + steps + tokens * (self.kv_bytes_per_token(shape) + self.draft_bytes_per_token)
        return 0 < weights.copied <= self.available * _COPY_SHARE and needed <= self.available

    def step_bytes(self, shape: Shape, num_tokens: int, left: int) -> int:
        """Estimate the peak memory of a step in bytes, without weights and KV cache.

        On a GPU `pool_size.activation_bytes` measures this memory after loading.

        Args:
            num_tokens: number of tokens in the step.
            left: bytes that remain after the weights are loaded. They limit the length of a sequence.
        """
        ranks, element = self.config.tensor_parallel_size, self.element_size
        heads, intermediate = -(-shape.heads // ranks), -(-shape.intermediate // ranks)
        width = 4 * shape.hidden + 2 * heads * shape.head_dim
        rows = min(self.config.max_num_seqs, num_tokens) if self.on_gpu else 1
        unpacked = self.longest_context(shape, left) * self._unpacked_bytes_per_token(shape)
        activations = num_tokens * width * element + max(num_tokens * 3 * intermediate * element, unpacked)
        logits = rows * shape.vocabulary * (element + 3 * 4)  # includes three copies in float32
        if not self.on_gpu:
            return activations + logits + _CPU_BYTES
        tables = 2 * 4 * -(-shape.context // self.config.block_size)
        kept = rows * (shape.vocabulary * (element + 2 * 4) + tables)  # see `device.state.decode_bytes`
        return max(activations, logits) + kept + GRAPH_BYTES

    def step_tokens(self, shape: Shape, left: int) -> int:
        """Return the maximum number of tokens in a step. ``left``: bytes that remain after the weights are loaded."""
        asked, least = self.config.max_num_batched_tokens, self.config.max_num_seqs
        if asked is not None:
            return asked
        if not self.on_gpu:
            return max(least, CPU_STEP_TOKENS)
        fitting = (
            tokens for tokens in GPU_STEP_TOKENS if self.step_bytes(shape, tokens, left) <= left * _GPU_STEP_SHARE
        )
        return max(least, next(fitting, GPU_STEP_TOKENS[-1]))

    def fit(self, weights: Weights, shape: Shape) -> Fit:
        """Return whether and how a model of this shape fits. ``weights``: the bytes of one rank's weights."""
        copied = weights.copied if self.keeps_copy(weights, shape) else 0
        memory = weights.memory + copied + self.draft_bytes
        left = self.available - memory
        steps = self.step_bytes(shape, self.step_tokens(shape, left), left)
        per_token = self.kv_bytes_per_token(shape) + self.draft_bytes_per_token
        least = min(self.config.max_model_len or LEAST_TOKENS, shape.context)
        wanted = min(self.config.max_model_len or CONVERSATION_TOKENS, shape.context)
        needed = memory + max(weights.loading, steps + least * per_token)
        pool_bytes = left - steps
        if not self.on_gpu:
            pool_bytes = min(pool_bytes, int(left * CPU_POOL_SHARE))
        most = self.config.pool_tokens or (None if self.on_gpu else CPU_POOL_TOKENS)
        if most is not None:
            pool_bytes = min(pool_bytes, max(most, least) * per_token)
        block = self.config.block_size
        tokens = max(0, pool_bytes) // (per_token * block) * block
        context = min(tokens, shape.context)
        fits = needed <= self.available and context >= least and (self.config.max_model_len or 0) <= shape.context
        fits_conversation = fits and context >= wanted
        return Fit(weights, copied, steps, least * per_token, needed, context if fits else 0, fits, fits_conversation)

    def longest_context(self, shape: Shape, left: int) -> int:
        """Return the maximum length of a sequence in tokens, rounded up to whole blocks.

        ``left`` is the number of bytes that remain after the weights are loaded.
        """
        per_token = self.kv_bytes_per_token(shape) + self.draft_bytes_per_token + self._unpacked_bytes_per_token(shape)
        block, most = self.config.block_size, max(0, left) // per_token
        if self.config.num_blocks is not None:
            most = self.config.num_blocks * block
        elif self.config.pool_tokens is not None:
            most = min(most, max(self.config.pool_tokens, self.config.max_model_len or 0))
        return -(-min(self.config.max_model_len or shape.context, most) // block) * block

    def _unpacked_bytes_per_token(self, shape: Shape) -> int:
        """Return the memory per token for one layer's K and V in 16 bits, dequantized from an 8-bit cache. In bytes.

        A GPU dequantizes one layer's cache at a time while it computes a prompt. The result is 0 on a CPU, and if the
        cache is not 8-bit.
        """
        unpacks = self.on_gpu and self.element_size == 2 and self.config.kv_cache_dtype == "int8"
        return self._on_a_rank(shape.kv_bytes_per_token(2) // shape.layers, shape) if unpacks else 0

    def kv_bytes_per_token(self, shape: Shape) -> int:
        """Return the bytes of one token's K and V in all layers, on one rank."""
        return self._on_a_rank(shape.kv_bytes_per_token(self.config.kv_element_size(self.element_size)), shape)

    def _on_a_rank(self, kv_bytes: int, shape: Shape) -> int:
        return kv_bytes * -(-shape.kv_heads // self.config.tensor_parallel_size) // shape.kv_heads

    def tokens_per_second(self, fit: Fit, shape: Shape, bandwidth: float) -> float:
        """Return the expected decoding speed at batch size 1, averaged over a conversation.

        The estimate assumes that a token reads all weights and, on average, half of the context. ``bandwidth`` is in
        bytes per second.
        """
        read = fit.weights.read + self.kv_bytes_per_token(shape) * min(fit.context, CONVERSATION_TOKENS) // 2
        return 1 / (read / (EFFICIENCY * bandwidth) + self.on_gpu * shape.layers * _GPU_SECONDS_PER_LAYER)

    def where(self) -> str:
        """Describe the device and its memory in words."""
        if not self.on_gpu:
            return f"this machine has {size(self.free)} of memory free"
        ranks = self.config.tensor_parallel_size
        gpu = f"each of {ranks} GPUs" if ranks > 1 else "the GPU"
        kept = size(self.free - self.available)
        unused = f", {kept} of it kept free by gpu_memory_utilization {self.config.gpu_memory_utilization:g}"
        return f"{gpu} has {size(self.free)} free" + (unused if self.free - self.available >= 1 << 20 else "")
