"""From a model's name to a runner: find the files, read them, load the weights, allocate the pool. Every rank does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.fit.budget import GRAPH_BYTES, Budget
from minillm.fit.forms import shape_of
from minillm.fit.weights import Weights
from minillm.kernels import Costs
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import TensorSource, load_llama, parameter_shapes
from minillm.model.random_tensors import RandomTensors
from minillm.model.rounded_tensors import RoundedTensors
from minillm.model.settle import settle
from minillm.model.shapes import SHAPES
from minillm.model.shard import shard_of
from minillm.parallel.collectives import Ranks
from minillm.progress import OnMessage, OnProgress, Progress, ignore_message, ignore_progress
from minillm.runner.device_runner import DeviceRunner, decode_bytes
from minillm.runner.fits import check_fits
from minillm.runner.pool_size import activation_bytes, budget_of, free_bytes, size_pool
from minillm.runner.runner import Runner
from minillm.runner.threads import FreeCores, follows_free_cores
from minillm.system import compact_heap
from minillm.text.tokenizer import Tokenizer
from minillm.weights.checkpoint import open_checkpoint
from minillm.weights.resolve import resolve
from minillm.weights.stored import StoredTensor


@dataclass(frozen=True)
class Description:
    """A model before its weights are read."""

    name: str
    config: ModelConfig
    tensors: tuple[StoredTensor, ...]  # as they are stored
    open_source: Callable[[torch.device], TensorSource]
    served_by: str
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class Limits:
    """The sizes that fit."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int
    num_tokens: int  # of a step


def describe(
    name: str,
    config: EngineConfig,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = ignore_message,
) -> Description:
    kind, _, form = config.load_format.partition(":")
    dummy = kind == "dummy"
    if dummy and name in SHAPES:
        model = SHAPES[name]
    else:
        files = resolve(name, on_progress=on_progress, on_message=on_message)
        checkpoint = open_checkpoint(files)
        model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
    if dummy:
        stored = tuple(StoredTensor(key, shape, "BF16") for key, shape in parameter_shapes(model))

        def random_tensors(device: torch.device) -> RandomTensors:
            return RandomTensors(model, device, config.seed, form or None)

        return Description(name, model, stored, random_tensors, "random weights", None)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source, model.vocab_size)
    stored = tuple(StoredTensor(key, checkpoint.shape(key), checkpoint.stored_as(key)) for key in checkpoint.names())
    return Description(name, model, stored, lambda device: checkpoint, files.source, tokenizer)


def load_weights(
    description: Description,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks | None,
    on_progress: OnProgress = ignore_progress,
) -> tuple[Llama, Budget]:
    """The model, or this rank's part of it, and the budget of the memory that was there before."""
    dtype, model_config = choose_dtype(config, device), description.config
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one

    in_8_bits = config.weights == "int8"
    if in_8_bits and (device.type != "cpu" or dtype != torch.float32):
        raise UsageError(
            "weights int8 needs a CPU and dtype float32: add --device cpu --dtype float32, or leave it out"
        )
    if config.quantize is not None and device.type != "cuda":
        raise UsageError(f"quantize {config.quantize} needs a GPU; a CPU has products of 8 bits: --weights int8")
    if config.kv_cache_dtype == "int8" and model_config.head_dim % 4:
        raise UsageError(
            f"kv_cache_dtype int8 needs a head_dim that 4 divides, and this model's is {model_config.head_dim}: "
            "leave it out"
        )
    longest = config.max_model_len or model_config.max_position_embeddings
    shard = shard_of(model_config, *((0, 1) if ranks is None else (ranks.rank, ranks.size)))
    budget = budget_of(config, device, dtype)
    check_fits(description.name, model_config, description.tensors, shard, budget)
    source: TensorSource = description.open_source(device)
    if config.quantize is not None:
        source = RoundedTensors(source, config.quantize)
    with compact_heap() if in_8_bits else nullcontext():
        model = load_llama(
            source,
            model_config,
            device=device,
            dtype=dtype,
            max_positions=longest,
            ranks=ranks,
            weights="int8" if in_8_bits else "stored" if budget.layout().keeps_low_bit else "expanded",
            on_progress=lambda done, total: on_progress(Progress("loading weights", done, total, "layers")),
        )
        in_memory = Weights(model.weight_bytes, model.weight_bytes, copied=model.copied_bytes)
        keeps_copy = budget.keeps_copy(in_memory, shape_of(model_config))
        if keeps_copy if ranks is None else ranks.least(keeps_copy):
            for linear in model.linears:
                linear.keep_copy(dtype)
        if config.kv_cache_dtype == "int8":
            model = replace(model, kv_in_8_bits=True)
        if in_8_bits:
            settle(model, longest)
    return model, budget


def build_runner(
    description: Description,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks | None,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = ignore_message,
) -> tuple[Runner, Limits]:
    """Load the weights, or this rank's part of them, choose tiles, and allocate the pool."""
    model, budget = load_weights(description, config, device, ranks, on_progress)
    dtype, model_config = model.dtype, description.config
    longest = config.max_model_len or model_config.max_position_embeddings
    if device.type == "cuda" and config.enable_tuning:
        from minillm.runner.tiles import TileFile, choose_tiles  # not at the top: it imports Triton

        choose_tiles(model, TileFile.of(device), ranks, on_progress, on_message)
    tokens = budget.step_tokens(shape_of(model_config), budget_of(config, device, dtype).available)
    if ranks is not None:
        tokens = ranks.least(tokens)
    reserved = 0
    if device.type == "cuda":
        if ranks is None and not model.rotary.dynamic:
            compile_ahead(model, config, longest)
        reserved = activation_bytes(model, tokens, config.max_num_seqs) + GRAPH_BYTES
        reserved += decode_bytes(model, config.max_num_seqs, longest, config.block_size)
    num_blocks, max_model_len = size_pool(config, model.local, device, model.kv_element_size, reserved, ranks)
    num_host_blocks = 0
    if config.preemption == "swap":
        space = min(config.swap_space_gb * 1e9, 0.5 * free_bytes(torch.device("cpu")))
        # By the bytes of the whole model: all ranks of a machine swap to the same memory.
        num_host_blocks = int(space / (model_config.kv_bytes_per_token(model.kv_element_size) * config.block_size))
        if ranks is not None:
            num_host_blocks = ranks.least(num_host_blocks)
    limits = Limits(num_blocks, max_model_len, num_host_blocks, tokens)
    # The angles of dynamic rope scaling are computed by the host at every step. Ranks on a CPU send each other as
    # little as those on GPUs do.
    if model.rotary.dynamic or (device.type == "cpu" and ranks is None):
        runner = Runner(model, num_blocks, config.block_size, num_host_blocks)
    else:
        whole = any(layer.attention.window is None for layer in model.layers)  # a layer that reads shared blocks
        # One plan for all ranks: it fits where they hold as many heads each.
        even = ranks is None or model.local.num_heads * ranks.size == model.config.num_heads
        runner = DeviceRunner(
            model,
            num_blocks,
            config.block_size,
            num_host_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            graphs=device.type == "cuda" and not config.enforce_eager,
            sharing=Costs() if config.enable_prefix_attention and even and whole else None,
        )
    if device.type == "cpu":
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        elif follows_free_cores():
            runner.observers.append(FreeCores())
    return runner, limits


def compile_ahead(model: Llama, config: EngineConfig, longest: int) -> None:
    """Compile and load the kernels of a first request side by side: in a row they take most of a first start."""
    runner = DeviceRunner(
        model, 1, config.block_size, max_num_seqs=config.max_num_seqs, max_model_len=longest, graphs=False, sharing=None
    )

    def rehearse(part: Callable[[], object]) -> None:
        torch.cuda.set_device(model.device)
        with torch.inference_mode():
            part()

    with ThreadPoolExecutor() as pool:
        list(pool.map(rehearse, runner.rehearsals()))
    torch.cuda.synchronize(model.device)


def choose_device(config: EngineConfig, local_rank: int = 0) -> torch.device:
    """The device that ``config`` asks for; where it names no GPU, that of this process's rank on this machine.

    Raises:
        UsageError: a GPU was asked for and there is none, or not that one.
    """
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
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
