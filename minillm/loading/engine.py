"""Build a running engine from a model's name: the only module that connects all parts."""

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from minillm.beams.method import Beams
from minillm.cache import BlockManager, SwapSpace
from minillm.config import EngineConfig
from minillm.engine.admission import Admission
from minillm.engine.disk_reads import DiskReads
from minillm.engine.engine import Engine
from minillm.engine.preemption import Preemption
from minillm.engine.requests import Requests
from minillm.engine.samples import Samples
from minillm.engine.scheduler import Scheduler
from minillm.errors import UsageError, memory_errors
from minillm.fit.budget import Budget
from minillm.loading.bandwidth import known_rate
from minillm.loading.build import Limits, build_runner
from minillm.loading.describe import Description, describe
from minillm.loading.device import choose_device, choose_dtype
from minillm.loading.disk import disk_tier
from minillm.loading.fits import choose_form
from minillm.loading.pool_size import budget_of
from minillm.loading.threads import clocks, follows_free_cores
from minillm.model.config import ModelConfig
from minillm.model.shard import check_size
from minillm.parallel.channel import Leader
from minillm.parallel.launch import Torchrun, lead
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.progress import OnMessage, OnProgress, ignore_message, ignore_progress
from minillm.runner import wire
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.observers import StepObserver
from minillm.runner.runner import Runner
from minillm.runner.step import StepWork
from minillm.sequence import Method
from minillm.speculation.drafter import drafter_of
from minillm.speculation.method import SpeculativeSamples
from minillm.weights.manifest import default_model

_CHAT_SEQS = 64  # enough for the candidates of an answer, or its beams, and for two more conversations
_STALL_SECONDS = 0.045  # maximum time for which other requests' prompts may delay a token of a running sequence


@memory_errors()
def load_engine(
    name: str | None,
    config: EngineConfig,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = lambda message: None,
) -> Engine:
    """Load model ``name`` (None: the default model), and create an engine for it.

    With ``tensor_parallel_size`` N, this starts N - 1 more processes, which end with the engine. Under torchrun, the
    first of every N ranks does so, and the other ranks end.

    Raises:
        SystemExit: under torchrun, another rank runs the engine.
        MinillmError: the model cannot be found, downloaded or read, or does not fit into memory.
    """
    name = name or default_model()
    torchrun, size = Torchrun.from_environment(), config.tensor_parallel_size
    if size > 1 and torchrun is not None and torchrun.num_replicas(size) and torchrun.rank % size:
        raise SystemExit(0)
    device = choose_device(config, 0 if torchrun is None else torchrun.rank)
    if device.type == "cuda":
        from minillm.kernels.compat import prepare_compiler

        threading.Thread(target=prepare_compiler, daemon=True).start()
    if size > 1 and device.type == "cuda" and (device.index or 0) + size > (there := torch.cuda.device_count()):
        raise UsageError(f"tensor_parallel_size {size} needs {size} GPUs, but this machine has {there}")
    since = clocks() if follows_free_cores() else None
    description = describe(name, config, on_progress, on_message)
    if size == 1:
        runner, limits = build_runner(description, config, device, None, on_progress, on_message, since)
        return new_engine(runner, config, limits, description, nullcontext, runner.close, on_message)
    check_size(description.config, size)
    if device.type == "cpu" and torchrun is None:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    ranks, leader = lead(name, config, device)
    with leader.watched():
        runner, limits = build_runner(description, config, device, ranks, on_progress, on_message)
    runner.observers.append(Followers(leader))
    endings = ExitStack()
    # Called in reverse order, because the runner's graphs use the ranks' collectives.
    for end in (ranks.close, runner.close, leader.close):
        endings.callback(end)
    engine = new_engine(
        runner, config, limits, description, leader.watched, endings.close, on_message, send=leader.send
    )
    if engine.requests.disk is not None:
        endings.callback(engine.requests.disk.close)  # before ``leader.close``, since it gathers the last blocks
    weakref.finalize(engine, endings.close)  # at the latest when the interpreter ends
    return engine


def best_form(
    name: str | None,
    config: EngineConfig,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = lambda message: None,
) -> str:
    """Return the name of the quantized version of a model that a chat loads: see `minillm.loading.fits.choose_form`.

    ``name`` is the model's name; None: the default model.
    """

    def budget() -> Budget:
        device = choose_device(config)
        return budget_of(config, device, choose_dtype(config, device))

    def bandwidth() -> float:
        return known_rate(choose_device(config))

    return choose_form(name or default_model(), budget, on_progress, on_message, bandwidth)


def chat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of EngineConfig for one person's chat. ``options`` override the choices made here.

    On a CPU with float32 weights, the chat speculates by n-gram lookup. Low-bit matmuls round several rows differently
    than one row, so with low-bit weights speculation would change sampled answers.

    On a GPU, the chat keeps no 16-bit copy of low-bit weights, because the copy hardly speeds up a single answer. It
    also reserves memory for fewer sequences: with a vocabulary of 128,256 tokens, each sequence takes a megabyte.
    """
    config = EngineConfig(**options)
    device = choose_device(config)
    if device.type == "cuda" and not options.keys() & {"num_blocks", "gpu_memory_utilization"}:
        options = {"weights": "stored", "max_num_seqs": _CHAT_SEQS, **options}
    alone = config.tensor_parallel_size == 1 and device.type == "cpu"
    exact = config.weights not in ("int8", "stored") and config.kv_cache_dtype != "int8"
    guesses = alone and exact and choose_dtype(config, device) == torch.float32
    return {**({"speculate": "lookup"} if guesses else {}), **options}


def new_engine(
    runner: Runner,
    config: EngineConfig,
    limits: Limits,
    description: Description,
    guard: Callable[[], AbstractContextManager[None]],
    on_close: Callable[[], object],
    on_message: OnMessage = ignore_message,
    *,
    send: Callable[[bytes], object] | None = None,
) -> Engine:
    """Create an engine from a runner. ``guard`` and ``on_close``: see `Engine`. ``send``: see `disk_tier`."""
    model, tokenizer = runner.model, description.tokenizer
    if tokenizer is not None and config.chat_template is not None:
        tokenizer.use_template(config.chat_template)
    eos = set(description.config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    prefill_chunk = config.prefill_chunk
    if prefill_chunk is None and model.device.type == "cuda":
        prefill_chunk = max(config.max_num_seqs, _tokens_in_a_stall(model.local, model.device))
    defaults = sampling_defaults(description.config.generation_defaults)
    cache = BlockManager(limits.num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching)
    preemption = Preemption(cache, SwapSpace(limits.num_host_blocks))
    scheduler = Scheduler(
        Admission(preemption, config.admission),
        config.max_num_seqs,
        limits.num_tokens,
        prefill_chunk=prefill_chunk,
        offline_chunk=config.prefill_chunk,
    )
    requests = Requests(
        scheduler,
        tokenizer,
        vocab_size=model.config.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=frozenset(eos),
        longest_plain_prompt=model.config.rope_changes_beyond,
    )
    tier = disk_tier(config, runner, cache, description, on_message, send)
    if tier is not None:
        runner.observers.insert(0, tier)  # before the step is sent: ranks copy evicted blocks before they compute it
        scheduler.admission.disk_reads = DiskReads(tier, cache, preemption.idle, requests.new_seq_id)
    engine = Engine(
        runner,
        requests,
        methods_for(requests, runner, config.seed, config.speculate),
        guard=guard,
        on_close=on_close,
        source=description.served_by,
        defaults=defaults,
    )
    if tier is not None:
        weakref.finalize(engine, tier.close)  # at the latest when the interpreter ends
    return engine


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings in a model's generation_config.json to fields of `SamplingParams`."""
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    defaults = {names.get(name, name): value for name, value in generation.items()}
    if defaults.pop("do_sample", True) is False:
        defaults["temperature"] = 0.0
    if "min_tokens" in defaults:
        defaults["min_tokens"] = min(defaults["min_tokens"], defaults.get("max_tokens", SamplingParams.max_tokens))
    return defaults


def methods_for(
    requests: Requests, runner: Runner, seed: int = 0, speculate: str = "off"
) -> dict[type[Params], Method]:
    """Return the decoding methods (sampling and beam search), by the type of a request's parameters.

    ``speculate`` is described in `EngineConfig`. If the runner has a draft model, that model proposes the draft tokens.
    """
    samples = Samples(requests, runner, seed)
    if speculate != "off":
        drafter = drafter_of(runner)
        samples = SpeculativeSamples(requests, runner, seed, None if drafter is None else drafter.draft_cost)
    device = runner.beams if isinstance(runner, DeviceRunner) else None
    return {SamplingParams: samples, BeamSearchParams: Beams(requests, device)}


@dataclass(frozen=True)
class Followers(StepObserver):
    """Observes rank 0's runner and sends every step to the other ranks of the model, which run the same steps."""

    leader: Leader

    def begin(self, work: StepWork) -> None:
        self.leader.send(wire.encode(work))


def _tokens_in_a_stall(config: ModelConfig, device: torch.device) -> int:
    """Estimate from the chip's data sheet how many prompt tokens a GPU computes in `_STALL_SECONDS`.

    (This is not measured, because a measurement varies between starts. Prompts would then be split into different
    chunks, and results would differ in their lowest bits.)
    """
    properties = torch.cuda.get_device_properties(device)
    # Half-precision FLOPs of a multiprocessor's tensor cores per cycle.
    per_cycle = {7: 1024, 8: 2048 if properties.minor == 0 else 1024, 9: 4096}.get(properties.major, 4096)
    rate = 0.65 * properties.multi_processor_count * per_cycle * 1.7e9
    return max(256, int(_STALL_SECONDS * rate / (2 * config.num_parameters)) // 256 * 256)
