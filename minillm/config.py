"""How the engine runs: explicit, and checked once, here."""

from dataclasses import dataclass
from typing import Any

from minillm.checks import check_fields, choice, custom, documented, flag, integer, number, shown
from minillm.errors import UsageError
from minillm.forms import FORMS
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


def _chat_template(name: str, value: Any) -> str | None:
    """The text of a template that is given as text or as a file."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a file or the text of a Jinja template, not {shown(value)}")
    if "{{" in value or "{%" in value:
        return value
    path = expanded(value, name)
    try:
        text = read_bytes(path, _MAX_TEMPLATE).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} {clean_line(value, 80)}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    if "{{" not in text and "{%" not in text:
        raise UsageError(f"{name} {clean_line(value, 80)}: this is no Jinja template: it has neither {{{{ nor {{%")
    return text


@documented
@dataclass(frozen=True)
class EngineConfig:
    """The options of `minillm.LLM`.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    device: str = custom("auto", _device, metavar="DEVICE", help="cpu, cuda or cuda:N; auto: a GPU where there is one")
    dtype: str = choice(
        "auto", ("auto", "float32", "bfloat16", "float16"), aliases={"float": "float32", "half": "float16"},
        help="of weights, activations and KV cache; auto: float32 on a CPU, bfloat16 on a GPU that has it",
    )  # fmt: skip
    kv_cache_dtype: str = choice(
        "auto", ("auto", "int8"),
        help="of the KV cache; int8: whole numbers with a scale for each token and head, room for nearly twice the "
        "tokens of 16 bits; auto: as dtype",
    )  # fmt: skip
    block_size: int = custom(16, _block_size, metavar="N", parse=int, help="token slots per block, a power of two")
    num_blocks: int | None = integer(None, 1, _MOST, help="blocks in the pool (default: what memory allows)")
    pool_tokens: int | None = integer(
        None, 1, _MOST,
        help="tokens that the pool holds at most, or max_model_len where that is more (default: 32768 on a CPU and in "
        "the chat, else what memory allows)",
    )  # fmt: skip
    max_model_len: int | None = integer(
        None, 1, _MOST, help="longest prompt plus answer in tokens (default: the model's own, or the pool's)"
    )
    max_num_seqs: int = integer(256, 1, _MOST, help="sequences computed at a time, over all requests")
    max_num_batched_tokens: int | None = integer(
        None,
        1,
        _MOST,
        help="tokens computed in a step (default: 512 on a CPU; on a GPU 8192, fewer where memory is short)",
    )
    prefill_chunk: int | None = integer(
        None, 1, _MOST,
        help="tokens of prompts in a step in which others decode, which wait for it (default: no bound on a CPU, about "
        "45 ms of work on a GPU)",
    )  # fmt: skip
    gpu_memory_utilization: float = number(
        0.9, 0.0, 1.0, above=True, help="part of the GPU's memory for weights, activations and pool together"
    )
    enable_prefix_caching: bool = flag(True, help="keep full blocks to be found where a later prompt begins alike")
    enable_prefix_attention: bool = flag(
        True, help="read blocks that decoding sequences share once for all of them, on a GPU and where that is faster"
    )
    deterministic: bool = flag(
        False,
        help="on a GPU, give a request the same bits whatever runs beside it, however its prompt is cut, and whatever "
        "was cached, preempted or guessed; about a tenth slower with weights of 16 bits, and shared blocks are read by "
        "each sequence",
    )
    preemption: str = choice(
        "swap", ("swap", "recompute"),
        help="when blocks run out, move a request's blocks to the host (or compute them again where the host is full), "
        "or compute them again in any case",
    )  # fmt: skip
    swap_space_gb: float = number(4.0, 0.0, 1e6, help="room on the host for swapped blocks, in 10^9 bytes")
    admission: str = choice(
        "predicted", ("predicted", "optimistic"),
        help="admit a request when the peak that all are heading for fits, or as soon as its prompt does",
    )  # fmt: skip
    speculate: str = custom(
        "off", _speculate, metavar="off|lookup|MODEL",
        help="compute guesses at an answer's next tokens beside the last one; the tokens are the same, but for last "
        "digits that depend on how many are computed at once, and come sooner where few requests run. lookup: guesses "
        "are found where the text, or the prompt, repeats itself; MODEL: a smaller model of the same tokens makes "
        "them, or the same one in few bits (name:q4_k_m; name:int4, int8 or fp8 rounds it while it is loaded)",
    )  # fmt: skip
    tensor_parallel_size: int = integer(
        1, 1, _MOST,
        help="processes that share the model, each on a GPU of its own (or all on this CPU); at most as many as the "
        "model has heads. Under torchrun they are there already",
    )  # fmt: skip
    enforce_eager: bool = flag(
        False,
        help="no CUDA graphs on a GPU, no compiled layers on a CPU: starts sooner, takes less memory, and decodes more "
        "slowly",
    )
    num_threads: int | None = integer(None, 1, 1024, help="threads on a CPU (default: as many as cores are free)")
    weights: str = choice(
        "auto", ("auto", "stored", "both", "expanded", "int8"),
        help="on a GPU, matrices of 4 to 8 bits as the file holds them; both: and a copy in dtype, which is faster for "
        "prompts and where dozens of requests run; auto: a copy where that takes at most a quarter of the memory; "
        "expanded: in dtype alone. int8: on a CPU, all matrices in 8 bits (a file's of 4 bits in 4 besides), which is "
        "faster and has other last digits. stored on a CPU: a file's matrices of 4 bits in 4 alone, its others of few "
        "bits in 8, which takes the least memory; prompts take longer than with int8. auto on a CPU: expanded if that "
        "takes at most half of the free memory, otherwise stored",
    )  # fmt: skip
    quantize: str | None = choice(
        None, ("int8", "int4", "fp8"),
        help="on a GPU, round the matrices of a model of 16 or 32 bits while it is loaded, the embedding excepted, and "
        "the head in fp8; this is for many requests at a time, on a GPU that computes with it",
    )  # fmt: skip
    enable_tuning: bool = flag(
        True, help="measure how low-bit matrices are cut best when a kind of GPU first meets them"
    )
    load_format: str = choice(
        "auto", ("auto", "dummy", *(f"dummy:{form}" for form in FORMS)),
        help="dummy: random weights; with a form, as a file of few bits would hold them",
    )  # fmt: skip
    chat_template: str | None = custom(
        None, _chat_template, metavar="FILE|TEXT",
        help="Jinja template of chats in place of the model's own: a file, or the template itself",
    )  # fmt: skip
    seed: int = integer(
        0, -(1 << 63), (1 << 63) - 1, cli=False, help="of the generator that gives a seed to each request without one"
    )

    @property
    def draft(self) -> str | None:
        """The name of the draft model that ``speculate`` asks for."""
        return None if self.speculate in ("off", "lookup") else self.speculate

    def kv_element_size(self, element_size: int) -> int:
        """Bytes of a number in the KV cache, where one of dtype takes ``element_size``: see `kv_row_bytes`."""
        return 1 if self.kv_cache_dtype == "int8" else element_size

    def __post_init__(self) -> None:
        check_fields(self)
        if self.draft is not None and self.tensor_parallel_size > 1:
            raise UsageError(
                f"speculate {shown(self.draft)} needs tensor_parallel_size 1: several ranks guess by lookup, or not"
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
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise UsageError(f"device {self.device!r}: with tensor_parallel_size each rank takes a GPU; say 'cuda'")
