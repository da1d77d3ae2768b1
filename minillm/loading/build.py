"""Build a runner on every rank: load the weights, choose tiles, allocate the pool."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from minillm.config import EngineConfig
from minillm.errors import CapacityError, UsageError
from minillm.fit.budget import GRAPH_BYTES, Budget
from minillm.fit.sizes import SizedModel, shape_of
from minillm.fit.weights import Weights
from minillm.kernels import Costs
from minillm.loading.compiling import with_compiled_layers
from minillm.loading.describe import Description, Draft, describe_draft
from minillm.loading.device import choose_dtype
from minillm.loading.fits import check_fits
from minillm.loading.kernel_cache import use_kernel_cache
from minillm.loading.pool_size import activation_bytes, budget_of, free_bytes, size_pool
from minillm.loading.threads import Clocks, FreeCores, follows_free_cores
from minillm.loading.upload import uploads
from minillm.model.calibration import bound_results, calibrate_int8
from minillm.model.llama import Llama
from minillm.model.loader import TensorSource, load_llama
from minillm.model.rounded_tensors import RoundedTensors
from minillm.model.shard import shard_of
from minillm.parallel.collectives import Ranks
from minillm.progress import OnMessage, OnProgress, Progress, ignore_message, ignore_progress, size
from minillm.runner.device.ahead import Compiler
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.device.state import decode_bytes
from minillm.runner.runner import Runner
from minillm.speculation.drafter import MOST_SEQS, Drafter
from minillm.system import compact_heap

_MAX_START_DELAY = 4.0  # maximum delay of the start for kernels that a first request does not need
_MIN_COMPILERS = 4  # compilers: fewer take longer than this process's own threads
_MAX_DRAFT_COST = 0.5  # speculation hardly saves time if a draft token takes more than this fraction of a token's time


@dataclass(frozen=True)
class Limits:
    """The largest sizes with which an engine fits into memory."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int
    num_tokens: int  # maximum tokens of a step


def load_weights(
    description: Description,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks | None,
    on_progress: OnProgress = ignore_progress,
    draft: Draft | None = None,
    on_message: OnMessage = ignore_message,
) -> tuple[Llama, Budget]:
    """Load the model, or this rank's part of it. Return the model, and the memory budget as it was before loading.

    ``draft``: a draft model; its memory is reserved.

    Raises UsageError if the device does not support an option. Raises CapacityError if the model does not fit, or if
    its context is shorter than ``max_model_len``.
    """
    dtype, model_config = choose_dtype(config, device), description.config
    longest, limit = config.max_model_len or model_config.max_position_embeddings, model_config.longest_context
    if longest > limit:
        raise CapacityError(f"max_model_len {longest} is above the model's context of {limit} tokens; lower it")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    if config.weights == "int8" and (device.type != "cpu" or dtype != torch.float32):
        raise UsageError(
            "weights int8 needs a CPU and dtype float32: add --device cpu --dtype float32, or leave it out"
        )
    if config.weights == "stored" and device.type == "cpu" and dtype != torch.float32:
        raise UsageError("weights stored on a CPU needs dtype float32: add --dtype float32, or leave it out")
    if config.weights == "both" and device.type == "cpu":
        raise UsageError("weights both needs a GPU: leave it out")
    if config.quantize is not None and device.type != "cuda":
        raise UsageError(f"quantize {config.quantize} needs a GPU; on a CPU use --weights int8")
    if config.deterministic and device.type != "cuda":
        raise UsageError("deterministic needs a GPU: leave it out")
    budget = budget_of(config, device, dtype)
    if draft is not None:
        budget = draft.reserve(budget)
    shard = shard_of(model_config, *((0, 1) if ranks is None else (ranks.rank, ranks.size)))
    check_fits(description.name, model_config, description.tensors, shard, budget)
    if budget.chooses_weights:
        whole = SizedModel(description.name, description.tensors, shape_of(model_config), 0)
        budget = _choose_weights(whole, budget, ranks, on_message)
    return _load(description, config, budget, device, longest, ranks, on_progress), budget


def _choose_weights(model: SizedModel, budget: Budget, ranks: Ranks | None, on_message: OnMessage) -> Budget:
    """Decide whether low-bit weights are dequantized when they are loaded. All ranks make the same decision.

    Return the budget with this choice. ``on_message`` is told if the weights stay low-bit.
    """
    dequantizes = model.decided(budget).config.weights == "expanded"
    if ranks is not None:
        dequantizes = bool(ranks.least(dequantizes))
    if not dequantizes:
        dequantized = size(model.weights(budget.with_weights("expanded")).memory)
        on_message(
            f"{model.name} stays low-bit: dequantized it would take {dequantized}, more than half of the free memory; "
            "--weights expanded dequantizes it"
        )
    return budget.with_weights("expanded" if dequantizes else "stored")


def _load(
    description: Description,
    config: EngineConfig,
    budget: Budget,
    device: torch.device,
    longest: int,
    ranks: Ranks | None,
    on_progress: OnProgress,
) -> Llama:
    storage = budget.layout().storage
    packs_itself = storage in ("int8", "int4")  # the matrices are packed for the CPU, partly at their first use
    if config.kv_cache_dtype == "int8" and description.config.head_dim % 4:
        raise UsageError(
            f"kv_cache_dtype int8 needs a head_dim divisible by 4, and {description.name}'s is "
            f"{description.config.head_dim}: leave it out"
        )
    source: TensorSource = description.open_source(device)
    if config.quantize is not None:
        source = RoundedTensors(source, config.quantize)
    with compact_heap() if device.type == "cpu" else nullcontext(lambda: None) as trim:

        def report(done: int, total: int) -> None:
            trim()  # otherwise the heap would keep four times the size of the embedding in freed memory
            on_progress(Progress("loading weights", done, total, "layers"))

        with uploads(device) as copy:
            model = load_llama(
                source,
                description.config,
                device=device,
                dtype=choose_dtype(config, device),
                max_positions=longest,
                ranks=ranks,
                weights=storage,
                on_progress=report,
                copy=copy,
            )
        copied = sum(linear.copied_bytes(model.dtype) for linear in model.linears)
        in_memory = Weights(model.weight_bytes, model.weight_bytes, copied=copied)
        keeps_copy = budget.keeps_copy(in_memory, shape_of(description.config))
        if keeps_copy if ranks is None else ranks.least(keeps_copy):
            for linear in model.linears:
                linear.keep_copy(model.dtype)
        if config.kv_cache_dtype == "int8":
            model = replace(model, kv_in_8_bits=True)
        if config.deterministic:
            from minillm.kernels.deterministic import OPS  # not at the top: it imports Triton

            model = replace(model, ops=OPS)
            if ranks is not None:
                ranks.keep_order()
        elif device.type == "cuda" and model.dtype.itemsize == 2:
            bound_results(model)
        if packs_itself:
            calibrate_int8(model, longest)
    return model


def build_runner(
    description: Description,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks | None,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = ignore_message,
    since: Clocks | None = None,
) -> tuple[Runner, Limits]:
    """Load the model (or this rank's part) and its draft model, choose tiles, and allocate the pools.

    Args:
        since: an earlier result of `threads.clocks`. Cores that other programs have used since then are left to them.
    """
    compiler = None
    if device.type == "cuda":
        has_kernels = use_kernel_cache(on_message)
        if ranks is None and not config.enforce_eager:
            from minillm.loading.kernel_compiler import KernelCompiler  # not at the top: it imports Triton

            compiler = KernelCompiler(on_message)
            if not has_kernels:
                compiler.start()  # while the weights are loaded
    try:
        return _build_runner(description, config, device, ranks, on_progress, on_message, since, compiler)
    except BaseException:
        if compiler is not None:
            compiler.close()
        raise


def _build_runner(
    description: Description,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks | None,
    on_progress: OnProgress,
    on_message: OnMessage,
    since: Clocks | None,
    compiler: Compiler | None,
) -> tuple[Runner, Limits]:
    cores = free_cores(config, device, since)
    if cores is not None:
        on_progress = following(cores, on_progress)
    drafting = describe_draft(description, config, device, on_progress, on_message)
    model, budget = load_weights(description, config, device, ranks, on_progress, drafting, on_message)
    longest = config.max_model_len or description.config.max_position_embeddings
    if not config.enforce_eager:
        model = with_compiled_layers(model, on_progress, on_message)
    models, draft = [model], None
    if drafting is not None:
        own = replace(budget, config=drafting.config)
        draft = _load(drafting.description, drafting.config, own, device, longest, None, on_progress)
        _check_smaller(draft, model, config)
        models.append(draft)
    if device.type == "cuda" and config.enable_tuning:
        from minillm.loading.tiles import TileFile, choose_tiles  # not at the top: it imports Triton

        for each in models:
            if not each.is_deterministic:  # its kernels have fixed tiles
                choose_tiles(each, TileFile.of(device), ranks, on_progress, on_message)
    left = budget_of(config, device, model.dtype).available
    tokens = budget.step_tokens(shape_of(description.config), left)
    if ranks is not None:
        tokens = ranks.least(tokens)
    reserved = 0
    more: list[Any] = []
    if device.type == "cuda":
        for each in models if ranks is None and not model.rotary.dynamic else []:
            more += compile_ahead(each, config, longest, compiler, on_progress)
        context = budget.longest_context(shape_of(description.config), left)
        reserved = max(activation_bytes(each, tokens, config.max_num_seqs, context) for each in models)
        reserved += GRAPH_BYTES * len(models) + decode_bytes(model, config.max_num_seqs, longest, config.block_size)
        reserved += 0 if draft is None else decode_bytes(draft, MOST_SEQS, longest, config.block_size)
    per_token = [each.local.kv_bytes_per_token(each.kv_element_size) for each in models]
    num_blocks, max_model_len = size_pool(
        config, model.local, device, model.kv_element_size, reserved, ranks, sum(per_token[1:])
    )
    num_host_blocks = 0
    if config.preemption == "swap":
        space = min(config.swap_space_gb * 1e9, 0.5 * free_bytes(torch.device("cpu")))
        # These are bytes for the whole model, because all ranks of a machine swap to the same memory.
        whole = description.config.kv_bytes_per_token(model.kv_element_size) + sum(per_token[1:])
        num_host_blocks = int(space / (whole * config.block_size))
        if ranks is not None:
            num_host_blocks = ranks.least(num_host_blocks)
    limits = Limits(num_blocks, max_model_len, num_host_blocks, tokens)
    runner = _new_runner(model, config, limits, ranks, compiler)
    if compiler is not None:
        compiler.wait(more, _MAX_START_DELAY)
        compiler.relax()
    if draft is not None:
        few = replace(config, max_num_seqs=MOST_SEQS, enable_prefix_attention=False)
        drafter = Drafter(_new_runner(draft, few, limits, None, compiler), num_blocks, num_host_blocks, model, tokens)
        runner.observers.append(drafter)
        if drafter.draft_cost > _MAX_DRAFT_COST:
            on_message(
                f"speculate {config.draft}: a draft token takes {drafter.draft_cost:.2f} of the time of a token here; "
                "the model drafts only while that is faster"
            )
    if cores is not None:
        runner.observers.append(cores)
    return runner, limits


def free_cores(config: EngineConfig, device: torch.device, since: Clocks | None) -> FreeCores | None:
    """Set torch's number of threads on a CPU. Return an observer that keeps adapting the number to the free cores.

    Return None on a GPU, or if the user chose the number.
    """
    if device.type != "cpu":
        return None
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
        return None
    if not follows_free_cores():
        return None
    cores = FreeCores(since=since)
    cores.follow()
    return cores


def following(cores: FreeCores, on_progress: OnProgress) -> OnProgress:
    """Return a function that adapts the number of threads and then calls ``on_progress``."""

    def progress(made: Progress) -> None:
        cores.follow()
        on_progress(made)

    return progress


def _check_smaller(draft: Llama, model: Llama, config: EngineConfig) -> None:
    """Raise UsageError unless a draft model reads fewer bytes of weights per token than the main model."""
    if draft.weight_bytes >= model.weight_bytes:
        raise UsageError(
            f"speculate {config.draft}: a draft token would read {size(draft.weight_bytes)} of weights, and a token of "
            f"the model itself {size(model.weight_bytes)}; name a smaller model, or quantize it further"
        )


def _new_runner(
    model: Llama, config: EngineConfig, limits: Limits, ranks: Ranks | None, compiler: Compiler | None
) -> Runner:
    """Return a runner with its pool."""
    sizes, device = (limits.num_blocks, config.block_size, limits.num_host_blocks), model.device
    # With dynamic rope scaling, the host computes angles at every step, so a plain Runner is needed. On a CPU, only
    # sharded models use a DeviceRunner: its ranks exchange less.
    if model.rotary.dynamic or (device.type == "cpu" and ranks is None):
        return Runner(model, *sizes)
    whole = any(layer.attention.window is None for layer in model.layers)  # some layer can read shared blocks
    # All ranks use one attention plan, which needs the same number of heads on each rank.
    even = ranks is None or model.local.num_heads * ranks.size == model.config.num_heads
    return DeviceRunner(
        model,
        *sizes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=limits.max_model_len,
        graphs=device.type == "cuda" and not config.enforce_eager,
        sharing=Costs() if config.enable_prefix_attention and not config.deterministic and even and whole else None,
        compiler=compiler,
    )


@torch.inference_mode()
def compile_ahead(
    model: Llama, config: EngineConfig, longest: int, compiler: Compiler | None, on_progress: OnProgress
) -> list[Any]:
    """Compile and load the kernels of a first request in parallel. Compiling them one by one takes most of a first
    start.

    ``compiler`` then compiles, in the background, kernels that other requests may need. Return the variants of these
    other kernels.
    """
    more: list[Any] = []
    runner = DeviceRunner(
        model, 1, config.block_size, max_num_seqs=config.max_num_seqs, max_model_len=longest, graphs=False, sharing=None
    )

    if compiler is not None:
        needed = [each for part in runner.rehearsals() for each in _missing(compiler, part)]
        if needed:  # otherwise an earlier process has compiled the others, too, and idle moments make sure of it
            more = [each for shape in runner.first_shapes() for each in _missing(compiler, shape.work)]
        compiler.submit([*needed, *more])
        while compiler.num_processes >= _MIN_COMPILERS and not compiler.wait(needed, seconds=0.2):
            on_progress(Progress("compiling kernels, once", compiler.num_done, len({*needed, *more}), "kernels"))

    def rehearse(part: Callable[[], object]) -> None:
        torch.cuda.set_device(model.device)
        with torch.inference_mode():
            part()

    with ThreadPoolExecutor() as pool:
        list(pool.map(rehearse, runner.rehearsals()))
    torch.cuda.synchronize(model.device)
    return more


def _missing(compiler: Compiler, work: Callable[[], object]) -> Sequence[Any]:
    """Return the variants that ``work`` needs and that are not compiled.

    If ``work`` fails, return an empty sequence, and ignore the error: it occurs again when the kernels are launched.
    """
    try:
        return compiler.missing(work)
    except Exception:
        return ()
