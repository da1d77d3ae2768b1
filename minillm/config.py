"""The options of the engine, declared and checked."""

from dataclasses import dataclass
from typing import Any

from minillm.checks import (
    check_fields,
    check_integer,
    choice,
    custom,
    documented,
    flag,
    integer,
    number,
    parse_bytes,
    shown,
)
from minillm.errors import UsageError
from minillm.storage import QUANTIZATIONS
from minillm.system import expanded
from minillm.text.reading import read_bytes
from minillm.text.safe import clean_line

BLOCK_SIZES = tuple(1 << power for power in range(9))
_MOST = 1 << 40
_MAX_TEMPLATE = 1 << 20  # bytes


def _device(name: str, device: Any) -> str:
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal() and len(index) < 5)):
        raise UsageError(f"{name} must be auto, cpu, cuda or cuda:N, not {shown(device)}")
    return str(device)


def _block_size(name: str, size: Any) -> int:
    if size not in BLOCK_SIZES or isinstance(size, bool):
        raise UsageError(f"{name} must be one of {', '.join(map(str, BLOCK_SIZES))}, not {shown(size)}")
    return int(size)


def _speculate(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be off, lookup or the name of a model, not {shown(value)}")
    return value


def _disk_cache(name: str, value: Any) -> int:
    """Return the maximum size of the disk cache in bytes. ``value`` is a number of bytes or a text such as 20GB."""
    if isinstance(value, str) and value != "0":
        size = parse_bytes(name, value)
        assert size is not None
        return size
    return check_integer(name, int(value) if isinstance(value, str) else value, 0, 1 << 60)


def _chat_template(name: str, value: Any) -> str | None:
    """Return the text of a chat template. ``value`` is this text or the name of a file with it."""
    if value is None:
        return None
    from minillm.text.chat_template import is_template
    from minillm.text.sandbox_process import syntax_error  # imports Jinja, which most commands do not need

    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a file or the text of a Jinja template, not {shown(value)}")
    text, subject = value, name
    if not is_template(value):
        path, subject = expanded(value, name), f"{name} {clean_line(value, 80)}"
        try:
            text = read_bytes(path, _MAX_TEMPLATE).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise UsageError(f"{subject}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
        if not is_template(text):
            raise UsageError(f"{subject}: this is no Jinja template: it has neither {{{{ nor {{%")
    if (wrong := syntax_error(text)) is not None:
        raise UsageError(f"{subject}: {clean_line(wrong, 300)}")
    return text


@documented
@dataclass(frozen=True)
class EngineConfig:
    """Hold the options of `minillm.LLM`.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    device: str = custom("auto", _device, metavar="DEVICE", help="cpu, cuda or cuda:N. auto: a GPU if there is one")
    dtype: str = choice(
        "auto", ("auto", "float32", "bfloat16", "float16"), aliases={"float": "float32", "half": "float16"},
        metavar="TYPE",
        help="data type of weights, activations and KV cache: float32, bfloat16 or float16. auto: float32 on a CPU, "
        "bfloat16 on a GPU that supports it",
    )  # fmt: skip
    kv_cache_dtype: str = choice(
        "auto", ("auto", "int8"),
        help="data type of the KV cache. int8: 8-bit integers with one scale per token and head, which holds almost "
        "twice as many tokens as 16 bits; auto: the same as dtype",
    )  # fmt: skip
    block_size: int = custom(
        16, _block_size, metavar="N", parse=int, help="tokens per block of the KV cache, a power of two"
    )
    num_blocks: int | None = integer(None, 1, _MOST, help="blocks in the KV cache (default: as many as memory allows)")
    pool_tokens: int | None = integer(
        None, 1, _MOST,
        help="most tokens in the KV cache, at least max_model_len (default: 32768 on a CPU and in the chat, otherwise "
        "as many as memory allows)",
    )  # fmt: skip
    max_model_len: int | None = integer(
        None, 1, _MOST, help="longest prompt plus answer in tokens (default: the model's limit, or the KV cache's size)"
    )
    max_num_seqs: int = integer(256, 1, _MOST, help="most sequences per step, over all requests")
    max_num_batched_tokens: int | None = integer(
        None, 1, _MOST, help="most tokens per step (default: 512 on a CPU; 8192 on a GPU, fewer if memory is short)"
    )
    prefill_chunk: int | None = integer(
        None, 1, _MOST,
        help="most prompt tokens per step while other sequences decode (default: no limit on a CPU and for offline "
        "runs, otherwise about 45 ms of work on a GPU)",
    )  # fmt: skip
    gpu_memory_utilization: float = number(
        0.9, 0.0, 1.0, above=True, help="fraction of the GPU's memory for weights, activations and KV cache"
    )
    enable_prefix_caching: bool = flag(True, help="reuse cached blocks for prompts that begin alike")
    enable_prefix_attention: bool = flag(
        True, help="share reads of common prefix blocks during decoding (on a GPU, when that is faster)"
    )
    deterministic: bool = flag(
        False,
        help="make answers on a GPU bitwise reproducible and batch-invariant. They then do not depend on other "
        "requests, chunked prefill, caching, preemption or speculation; it is about a tenth slower with 16-bit weights "
        "and each sequence reads shared blocks itself",
    )
    preemption: str = choice(
        "swap", ("swap", "recompute"),
        help="how to free blocks when none are left. swap: move a request's blocks to CPU memory, or recompute them if "
        "it is full; recompute: always recompute",
    )  # fmt: skip
    swap_space_gb: float = number(4.0, 0.0, 1e6, help="CPU memory for swapped blocks, in GB (10^9 bytes)")
    disk_cache: int = custom(
        0, _disk_cache, metavar="SIZE",
        help="disk space for blocks of the KV cache, such as 20GB; 0: none. A later process with the same model reads "
        "the blocks again instead of computing them",
    )  # fmt: skip
    admission: str = choice(
        "predicted", ("predicted", "optimistic"), metavar="POLICY",
        help="when to admit a request: predicted or optimistic. predicted: when the expected peak of all requests "
        "fits; optimistic: as soon as its prompt fits",
    )  # fmt: skip
    speculate: str = custom(
        "off", _speculate, metavar="off|lookup|MODEL",
        help="speculative decoding. lookup: propose draft tokens by n-gram lookup in the prompt and the answer; MODEL: "
        "propose them with a smaller model of the same vocabulary, or with the same model quantized (name:q4_k_m; "
        "name:int4, name:int8 and name:fp8 quantize it while loading). Answers stay the same up to rounding, which "
        "depends on the number of tokens per step. It speeds up a few requests at a time",
    )  # fmt: skip
    tensor_parallel_size: int = integer(
        1, 1, _MOST,
        help="processes that share the model, each on its own GPU or all on this CPU. At most the model's number of "
        "attention heads",
    )  # fmt: skip
    enforce_eager: bool = flag(
        False,
        help="use no CUDA graphs on a GPU and no compiled layers on a CPU. Starts faster and takes less memory, but "
        "decodes slower",
    )
    num_threads: int | None = integer(None, 1, 1024, help="CPU threads (default: one per free core)")
    weights: str = choice(
        "auto", ("auto", "stored", "both", "expanded", "int8"), metavar="MODE",
        help="how to hold weight matrices: stored, both, expanded or int8. stored: quantized as in the file (on a CPU "
        "4-bit matrices in 4 bits and other quantized ones in 8), which takes the least memory; both: on a GPU, with "
        "a copy in dtype, which is faster for prompts and for dozens of requests; expanded: dequantized to dtype; "
        "int8: on a CPU, all matrices in 8 bits (4-bit ones also in 4), which is faster and rounds differently. auto: "
        "on a GPU both if the copy takes at most a quarter of the memory, otherwise stored; on a CPU expanded if that "
        "takes at most half of the free memory, otherwise stored",
    )  # fmt: skip
    quantize: str | None = choice(
        None, ("int8", "int4", "fp8"),
        help="quantize a 16-bit or 32-bit model while loading it, on a GPU. The embedding is not quantized, nor is the "
        "output head with fp8; fp8 is for many requests at a time on a GPU with FP8 matrix units",
    )  # fmt: skip
    enable_tuning: bool = flag(True, help="tune the low-bit kernels at the first load on a new kind of GPU")
    load_format: str = choice(
        "auto", ("auto", "dummy", *(f"dummy:{form}" for form in QUANTIZATIONS)), metavar="FORMAT",
        help="auto, dummy or dummy:QUANTIZATION. auto: load the model's files; dummy: use random weights, quantized "
        f"if a quantization is given ({', '.join(QUANTIZATIONS)})",
    )  # fmt: skip
    chat_template: str | None = custom(
        None, _chat_template, metavar="FILE|TEXT",
        help="Jinja chat template to use instead of the model's own, as a file or as text",
    )  # fmt: skip
    seed: int = integer(
        0, -(1 << 63), (1 << 63) - 1, cli=False, help="seed of the generator of seeds for requests without one"
    )

    @property
    def draft(self) -> str | None:
        """Return the draft model that ``speculate`` names, or None if it names none (off, lookup)."""
        return None if self.speculate in ("off", "lookup") else self.speculate

    def kv_element_size(self, element_size: int) -> int:
        """Return the bytes per number in the KV cache: 1 if it is 8-bit, else ``element_size``, that of ``dtype``."""
        return 1 if self.kv_cache_dtype == "int8" else element_size

    def __post_init__(self) -> None:
        check_fields(self)
        if self.draft is not None and self.tensor_parallel_size > 1:
            raise UsageError(
                f"speculate {shown(self.draft)} needs tensor_parallel_size 1: with several ranks, use lookup or off"
            )
        for name in ("max_num_batched_tokens", "prefill_chunk"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < self.max_num_seqs:
                why = "every running sequence needs one token a step; lower max_num_seqs"
                raise UsageError(f"{name} {tokens} is below max_num_seqs {self.max_num_seqs}: {why}")
        if self.deterministic and self.weights == "both":
            raise UsageError("deterministic and weights both exclude each other: leave one out")
        if self.quantize is not None and self.weights in ("expanded", "int8"):
            raise UsageError(f"quantize {self.quantize} and weights {self.weights} exclude each other: leave one out")
        if self.disk_cache and not self.enable_prefix_caching:
            raise UsageError("disk_cache needs prefix caching: leave one of the two options out")
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise UsageError(f"device {self.device!r}: with tensor_parallel_size each rank takes a GPU; say 'cuda'")
