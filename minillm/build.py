"""From a model's name to a running engine: find the files, read them, load the weights, allocate the pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kernels import Costs
from minillm.cache import BlockManager, SwapSpace
from minillm.config import EngineConfig, choose_device, choose_dtype
from minillm.decode import decode_bytes
from minillm.engine import Engine
from minillm.errors import WeightsError
from minillm.memory import activation_bytes, check_weights_fit, free_bytes, size_pool
from minillm.model.config import ModelConfig
from minillm.model.loader import RandomTensors, TensorSource, load_llama
from minillm.model.shapes import SHAPES
from minillm.progress import OnProgress, Progress, ignore_progress
from minillm.runner import Runner
from minillm.scheduler import Scheduler
from minillm.tokenizer import Tokenizer
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

    Raises:
        MinillmError: the model cannot be found, fetched, read or held in memory.
    """
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    tokenizer: Tokenizer | None = None

    def layers_loaded(done: int, total: int) -> None:
        on_progress(Progress("loading weights", done, total, "layers"))

    source: TensorSource
    served_by = "random weights"
    if config.load_format == "dummy" and name in SHAPES:
        model_config = SHAPES[name]
        source = RandomTensors(model_config, device, config.seed)
    else:
        files = resolve(name, on_progress=on_progress, on_message=on_message)
        checkpoint = open_checkpoint(files)
        model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        if config.load_format == "dummy":
            source = RandomTensors(model_config, device, config.seed)
        else:
            source, served_by = checkpoint, files.source
            tokenizer = _load_tokenizer(checkpoint.tokenizer_source, model_config)
    longest = max(config.max_model_len or 0, model_config.max_position_embeddings)
    check_weights_fit(model_config, device, dtype.itemsize)
    model = load_llama(
        source, model_config, device=device, dtype=dtype, max_positions=longest, on_progress=layers_loaded
    )
    tokens = config.max_num_batched_tokens
    if tokens is None:
        tokens = max(config.max_num_seqs, _CPU_BATCHED_TOKENS if device.type == "cpu" else _GPU_BATCHED_TOKENS)
    reserved = 0
    if device.type == "cuda":
        reserved = activation_bytes(model, tokens, config.max_num_seqs) + _GRAPH_BYTES
        reserved += decode_bytes(model, config.max_num_seqs, longest, config.block_size)
    pool = size_pool(config, model_config, device, dtype.itemsize, reserved)
    cache = BlockManager(pool.num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching)
    num_host_blocks = 0
    if config.preemption == "swap":
        space = min(config.swap_space_gb * 1e9, 0.5 * free_bytes(torch.device("cpu")))
        num_host_blocks = int(space / (model_config.kv_bytes_per_token(dtype.itemsize) * config.block_size))
    prefill_chunk = config.prefill_chunk
    if prefill_chunk is None and device.type == "cuda":
        prefill_chunk = max(config.max_num_seqs, _tokens_in_a_stall(model_config, device))
    eos = set(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    runner = Runner(model, pool.num_blocks, config.block_size, num_host_blocks)
    if device.type == "cuda" and not model.rotary.dynamic:  # whose angles the host computes at every step
        runner.decode_on_device(
            config.max_num_seqs,
            pool.max_model_len,
            graphs=not config.enforce_eager,
            sharing=Costs() if config.enable_prefix_attention else None,
        )
    return Engine(
        runner=runner,
        cache=cache,
        scheduler=Scheduler(
            cache, config.max_num_seqs, tokens, SwapSpace(num_host_blocks), config.admission, prefill_chunk
        ),
        tokenizer=tokenizer,
        max_model_len=pool.max_model_len,
        eos_token_ids=frozenset(eos),
        source=served_by,
        seed=config.seed,
    )


def _tokens_in_a_stall(config: ModelConfig, device: torch.device) -> int:
    """How many prompt tokens a GPU computes in `_STALL_SECONDS`, roughly: by the chip's data sheet, not by a clock.

    (What was measured would differ from start to start, and with it how prompts are cut, and with that the last bits.)
    """
    properties = torch.cuda.get_device_properties(device)
    # FLOPs of the matrix units per multiprocessor and cycle, in half precision.
    per_cycle = {7: 1024, 8: 2048 if properties.minor == 0 else 1024, 9: 4096}.get(properties.major, 4096)
    rate = 0.65 * properties.multi_processor_count * per_cycle * 1.7e9
    return max(256, int(_STALL_SECONDS * rate / (2 * config.num_parameters)) // 256 * 256)


def _load_tokenizer(source: Path | Mapping[str, Any], config: ModelConfig) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(source) if isinstance(source, Path) else Tokenizer.from_gguf(source)
    if tokenizer.vocab_size > config.vocab_size:
        raise WeightsError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model's embedding {config.vocab_size} rows: "
            "they belong to different models"
        )
    return tokenizer
