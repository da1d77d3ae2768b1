"""From a model's name to a running engine: find the files, read them, load the weights, allocate the pool."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch.distributed import Store

from minillm.cache import BlockManager, SwapSpace
from minillm.config import EngineConfig, choose_device, choose_dtype
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Scheduler
from minillm.errors import MinillmError, UsageError
from minillm.kernels import Costs
from minillm.model.config import ModelConfig
from minillm.model.loader import RandomTensors, TensorSource, load_llama
from minillm.model.shapes import SHAPES
from minillm.model.shard import check_size, shard_of
from minillm.parallel.channel import Follower, Leader
from minillm.parallel.collectives import Ranks
from minillm.parallel.launch import Torchrun, begin_to_beat, join, lead
from minillm.progress import OnProgress, Progress, ignore_progress
from minillm.runner.pool_size import activation_bytes, check_weights_fit, free_bytes, size_pool
from minillm.runner.rows import decode_bytes
from minillm.runner.runner import Runner
from minillm.runner.step import StepWork
from minillm.text.tokenizer import Tokenizer
from minillm.weights.checkpoint import open_checkpoint
from minillm.weights.files import OnMessage
from minillm.weights.resolve import resolve

_CPU_BATCHED_TOKENS = 512  # a step of a 135M model then takes about a second
_GPU_BATCHED_TOKENS = 8192
_GRAPH_BYTES = 512 << 20  # the CUDA graphs, cuBLAS's workspace, and what the allocator cannot use
_STALL_SECONDS = 0.045  # that a running sequence may wait for others' prompts, at each token


def build_engine(
    name: str,
    config: EngineConfig,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = lambda message: None,
) -> Engine:
    """Load model ``name`` and make an engine for it.

    With ``tensor_parallel_size`` N, N - 1 more processes are started, which end with the engine. Under torchrun they
    are there already: in those that are not rank 0 of a model this call never returns; it ends the process when rank 0
    has no more work.

    Raises:
        MinillmError: the model cannot be found, fetched, read or held in memory.
    """
    torchrun, size = Torchrun.from_environment(), config.tensor_parallel_size
    if torchrun is not None:
        begin_to_beat(torchrun)
    device = choose_device(config, 0 if torchrun is None else torchrun.local_rank)
    if size > 1:
        if torchrun is not None:
            torchrun.num_replicas(size)
            if torchrun.rank % size:
                follow(*join(torchrun, size), name, config, device, torchrun.host())
        elif device.type == "cuda" and size > torch.cuda.device_count():
            raise UsageError(
                f"tensor_parallel_size {size} needs {size} GPUs, and this machine has {torch.cuda.device_count()}"
            )
    description = _describe(name, config, on_progress, on_message)
    leader: Leader | None = None
    ranks: Ranks | None = None
    if size > 1:
        check_size(description.config, size)
        if device.type == "cpu" and torchrun is None:
            torch.set_num_threads(max(1, torch.get_num_threads() // size))
        ranks, leader = lead(name, config, device, torchrun)
    with nullcontext() if leader is None else leader.watched():
        runner, limits = _build_runner(description, config, device, ranks, leader, on_progress)
    tokenizer = description.tokenizer
    eos = set(description.config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    cache = BlockManager(limits.num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching)
    prefill_chunk = config.prefill_chunk
    if prefill_chunk is None and device.type == "cuda":
        prefill_chunk = max(config.max_num_seqs, _tokens_in_a_stall(runner.model.local, device))
    swap = SwapSpace(limits.num_host_blocks)
    return Engine(
        runner=runner,
        cache=cache,
        scheduler=Scheduler(cache, config.max_num_seqs, limits.num_tokens, swap, config.admission, prefill_chunk),
        tokenizer=tokenizer,
        max_model_len=limits.max_model_len,
        eos_token_ids=frozenset(eos),
        source=description.served_by,
        seed=config.seed,
    )


def follow(
    follower: Follower, store: Store, rank: int, name: str, config: EngineConfig, device: torch.device, host: str
) -> NoReturn:
    """Be rank ``rank`` of a model, until rank 0 has no more work; then end the process.

    What goes wrong is reported to rank 0, which raises it. ``host``: see `Ranks`.
    """
    status = 0
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # under torchrun ctrl-c reaches all; this one ends with rank 0
    try:
        ranks = Ranks(store, rank, config.tensor_parallel_size, device, host)
        runner, _ = _build_runner(_describe(name, config), config, device, ranks)
        for message in follower.messages():
            runner.compute(StepWork.from_message(message))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the others may still need what is under way
    except Exception as error:
        follower.fail(str(error) if isinstance(error, MinillmError) else f"{type(error).__name__}: {error}")
        status = 1
    # Not sys.exit: what waits for other ranks, on the device or in a thread of the process group, must not hold it up.
    sys.stderr.flush()
    os._exit(status)


@dataclass(frozen=True)
class _Description:
    """All that is known of a model before its weights are read."""

    config: ModelConfig
    open_source: Callable[[torch.device], TensorSource]
    served_by: str
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class _Limits:
    """What fits."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int
    num_tokens: int  # of a step


def _describe(
    name: str,
    config: EngineConfig,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = lambda message: None,
) -> _Description:
    def random_tensors(model: ModelConfig) -> Callable[[torch.device], TensorSource]:
        return lambda device: RandomTensors(model, device, config.seed)

    if config.load_format == "dummy" and name in SHAPES:
        return _Description(SHAPES[name], random_tensors(SHAPES[name]), "random weights", None)
    files = resolve(name, on_progress=on_progress, on_message=on_message)
    checkpoint = open_checkpoint(files)
    model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config, max_model_len=config.max_model_len)
    if config.load_format == "dummy":
        return _Description(model, random_tensors(model), "random weights", None)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source, model.vocab_size)
    return _Description(model, lambda device: checkpoint, files.source, tokenizer)


def _build_runner(
    description: _Description,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks | None,
    leader: Leader | None = None,
    on_progress: OnProgress = ignore_progress,
) -> tuple[Runner, _Limits]:
    """Load the weights, or this rank's part of them, and allocate the pool: what every rank does."""
    dtype, model_config = choose_dtype(config, device), description.config
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one

    def layers_loaded(done: int, total: int) -> None:
        on_progress(Progress("loading weights", done, total, "layers"))

    longest = config.max_model_len or model_config.max_position_embeddings
    shard = shard_of(model_config, *((0, 1) if ranks is None else (ranks.rank, ranks.size)))
    check_weights_fit(shard.local(model_config), device, dtype.itemsize)
    model = load_llama(
        description.open_source(device),
        model_config,
        device=device,
        dtype=dtype,
        max_positions=longest,
        ranks=ranks,
        on_progress=layers_loaded,
    )
    tokens = config.max_num_batched_tokens
    if tokens is None:
        tokens = max(config.max_num_seqs, _CPU_BATCHED_TOKENS if device.type == "cpu" else _GPU_BATCHED_TOKENS)
    reserved = 0
    if device.type == "cuda":
        reserved = activation_bytes(model, tokens, config.max_num_seqs) + _GRAPH_BYTES
        reserved += decode_bytes(model, config.max_num_seqs, longest, config.block_size)
    pool = size_pool(config, model.local, device, dtype.itemsize, reserved, ranks)
    num_host_blocks = 0
    if config.preemption == "swap":
        space = min(config.swap_space_gb * 1e9, 0.5 * free_bytes(torch.device("cpu")))
        # By the bytes of the whole model: all ranks of a machine swap to the same memory.
        num_host_blocks = int(space / (model_config.kv_bytes_per_token(dtype.itemsize) * config.block_size))
        if ranks is not None:
            num_host_blocks = ranks.least(num_host_blocks)
    runner = Runner(model, pool.num_blocks, config.block_size, num_host_blocks, leader)
    # The angles of dynamic rope scaling are computed by the host at every step. Ranks on a CPU send each other as
    # little as those on GPUs do.
    if (device.type == "cuda" or ranks is not None) and not model.rotary.dynamic:
        # One plan for all ranks: it fits where they hold as many heads each.
        even = ranks is None or model.local.num_heads * ranks.size == model_config.num_heads
        runner.decode_on_device(
            config.max_num_seqs,
            pool.max_model_len,
            graphs=device.type == "cuda" and not config.enforce_eager,
            sharing=Costs() if config.enable_prefix_attention and even else None,
        )
    return runner, _Limits(pool.num_blocks, pool.max_model_len, num_host_blocks, tokens)


def _tokens_in_a_stall(config: ModelConfig, device: torch.device) -> int:
    """How many prompt tokens a GPU computes in `_STALL_SECONDS`, roughly: by the chip's data sheet, not by a clock.

    (What was measured would differ from start to start, and with it how prompts are cut, and with that the last bits.)
    """
    properties = torch.cuda.get_device_properties(device)
    # FLOPs of the matrix units per multiprocessor and cycle, in half precision.
    per_cycle = {7: 1024, 8: 2048 if properties.minor == 0 else 1024, 9: 4096}.get(properties.major, 4096)
    rate = 0.65 * properties.multi_processor_count * per_cycle * 1.7e9
    return max(256, int(_STALL_SECONDS * rate / (2 * config.num_parameters)) // 256 * 256)
