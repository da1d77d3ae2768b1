"""How the engine runs: explicit, and checked once, here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm.errors import UsageError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
BLOCK_SIZES = tuple(1 << power for power in range(9))
LOAD_FORMATS = ("auto", "dummy")
PREEMPTIONS = ("swap", "recompute")
ADMISSIONS = ("predicted", "optimistic")


@dataclass(frozen=True)
class EngineConfig:
    """The options of `minillm.LLM`.

    Attributes:
        device: ``"auto"`` (a GPU where there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        dtype: of weights, activations and KV cache: ``"auto"`` (float32 on a CPU; bfloat16 on a GPU that has it),
            ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        block_size: token slots per block: a power of two from 1 to 256.
        num_blocks: blocks in the pool; None takes what memory allows.
        max_model_len: longest prompt plus completion, in tokens; None takes the model's own, or the pool if that is
            smaller.
        max_num_seqs: sequences computed at a time, over all requests.
        max_num_batched_tokens: tokens computed per step; None: 512 on a CPU, 8192 on a GPU.
        prefill_chunk: tokens of prompts computed in a step in which others decode, at most; it bounds how long those
            wait for their next token. At least max_num_seqs. None: no bound on a CPU, about 45 ms of work on a GPU.
        gpu_memory_utilization: the part of the GPU's memory that weights, activations and pool may take together.
        enable_prefix_caching: keep the full blocks of what was computed, to be found where a prompt begins alike.
        enable_prefix_attention: on a GPU, read blocks that decoding sequences share once for all of them, where that is
            faster.
        preemption: what happens to a request when blocks run out: ``"swap"`` moves its blocks to the host (and falls
            back to the other where the host is full), ``"recompute"`` computes them again.
        swap_space_gb: room on the host for swapped blocks, in 10^9 bytes.
        admission: ``"predicted"`` admits a request when the peak that all are heading for fits, ``"optimistic"`` when
            its prompt does.
        tensor_parallel_size: processes that share the model, each on a GPU of its own (or all on this CPU): they are
            started with it, or, under torchrun, are there already. At most as many as the model has heads.
        enforce_eager: on a GPU, launch every kernel of a decode step by itself instead of replaying CUDA graphs: starts
            sooner, takes less memory, and is slower.
        load_format: ``"auto"``, or ``"dummy"`` for random weights.
        seed: of the generator that gives a seed to every request that brings none.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    prefill_chunk: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_prefix_attention: bool = True
    preemption: str = "swap"
    swap_space_gb: float = 4.0
    admission: str = "predicted"
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    load_format: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":") if isinstance(self.device, str) else ("", "", "")
        if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
            raise UsageError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        if self.dtype not in ("auto", *DTYPES):
            raise UsageError(f"dtype must be auto, {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.block_size not in BLOCK_SIZES or isinstance(self.block_size, bool):
            raise UsageError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {self.block_size!r}")
        if self.load_format not in LOAD_FORMATS:
            raise UsageError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {self.load_format!r}")
        for name, allowed in (("preemption", PREEMPTIONS), ("admission", ADMISSIONS)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("enable_prefix_caching", "enable_prefix_attention", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}")
        space = self.swap_space_gb
        if isinstance(space, bool) or not isinstance(space, (int, float)) or not 0 <= space <= 1e6:
            raise UsageError(f"swap_space_gb must be from 0 to 1000000, not {space!r}")
        counts = ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk")
        for name in (*counts, "tensor_parallel_size"):
            value = getattr(self, name)
            if value is None and name not in ("max_num_seqs", "tensor_parallel_size"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
                raise UsageError(f"{name} must be a positive whole number, not {value!r}")
        for name in ("max_num_batched_tokens", "prefill_chunk"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < self.max_num_seqs:
                raise UsageError(
                    f"{name} {tokens} is below max_num_seqs {self.max_num_seqs}: "
                    "every running sequence needs one token a step; lower max_num_seqs"
                )
        if self.tensor_parallel_size > 1 and index:
            raise UsageError(f"device {self.device!r}: with tensor_parallel_size each rank takes a GPU; say 'cuda'")
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, (int, float)) or not 0 < utilization <= 1:
            raise UsageError(f"gpu_memory_utilization must be above 0 and at most 1, not {utilization!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"seed must be a whole number, not {self.seed!r}")


def choose_device(config: EngineConfig, local_rank: int = 0) -> torch.device:
    """The device that ``config`` asks for.

    Args:
        local_rank: of this process among those on this machine; where ``config`` names no GPU it takes that one.

    Raises:
        UsageError: a GPU was asked for and there is none, or not that one.
    """
    import torch

    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if config.device == "auto":
            return torch.device("cpu")
        built = torch.version.cuda
        reason = f"torch {torch.__version__} was built without CUDA" if built is None else "torch finds no CUDA GPU"
        raise UsageError(f"device {config.device}: {reason}; use --device cpu, or install a CUDA build of torch")
    device = torch.device("cuda" if config.device == "auto" else config.device)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UsageError(f"device {config.device}: this machine has {torch.cuda.device_count()} GPUs")
    if device.index is None and local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"rank {local_rank} would take GPU {local_rank}, and this machine has {torch.cuda.device_count()}; "
            "start fewer ranks (tensor_parallel_size, or torchrun's --nproc-per-node)"
        )
    return torch.device("cuda", local_rank if device.index is None else device.index)


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The dtype that ``config`` asks for on ``device``."""
    import torch

    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
