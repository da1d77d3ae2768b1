"""Several ranks give the results of one: in threads over small random models, and in processes over real weights."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib.engine import identity_of, run
from lib.models import StateDict, hf_model
from lib.programs.warm import process_of
from lib.terminal import children, wait_until_gone
from lib.torchrun import of_two_ranks, torchrun
from minillm import LLM, BeamSearchParams, MinillmError, SamplingParams
from minillm.blockstore.files import BlockStore, listed
from minillm.blockstore.tier import DiskTier
from minillm.cache import BlockManager, HostMoves, SwapSpace
from minillm.engine.admission import Admission
from minillm.engine.disk_reads import DiskReads
from minillm.engine.engine import Engine
from minillm.engine.preemption import Preemption
from minillm.engine.requests import Requests
from minillm.engine.scheduler import Scheduler
from minillm.errors import CapacityError, UsageError
from minillm.kernels.attention.plan import FREE
from minillm.loading.engine import Followers, methods_for
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.llama_tensors import LlamaTensors
from minillm.model.loader import load_llama, parameter_shapes
from minillm.model.shapes import SHAPES
from minillm.model.shard import shard_of
from minillm.outputs import RequestOutput
from minillm.parallel.channel import RankDied, send_message
from minillm.parallel.collectives import Ranks
from minillm.parallel.launch import Torchrun
from minillm.params import Params
from minillm.runner import scores, wire
from minillm.runner.block_reads import BlockReader
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.device.work import DecodeWork
from minillm.runner.runner import Runner
from minillm.runner.sharded_blocks import ShardedBlocks
from minillm.runner.step import ChunkWork, StepWork
from minillm.runner.wire import BlockMove
from minillm.system import start_connected

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Let ranks share the cores; later tests get all the cores back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the part of each rank --------------------------------------------------------------------------------------------


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
    intermediate=st.integers(16, 4000),
    vocab=st.integers(1, 5000),
    size=st.integers(1, 16),
)
def test_every_head_column_and_token_has_one_owner(
    kv_heads: int, group: int, intermediate: int, vocab: int, size: int
) -> None:
    config = ModelConfig(
        "LlamaForCausalLM", vocab, 8 * kv_heads * group, 1, kv_heads * group, kv_heads, 8, intermediate, 1e-5, 64,
        rope=SHAPES["llama-8b"].rope,
    )  # fmt: skip
    if size > config.num_heads:
        with pytest.raises(UsageError, match="heads"):
            shard_of(config, 0, size)
        return
    shards = [shard_of(config, rank, size) for rank in range(size)]
    for part, count in (("heads", config.num_heads), ("intermediate", intermediate)):
        owned = [i for shard in shards for i in range(count)[getattr(shard, part)]]
        assert owned == list(range(count)), part
    assert {shard.vocab.stop - shard.vocab.start for shard in shards} == {-(-vocab // size)}
    assert [i for shard in shards for i in range(vocab)[shard.vocab]] == list(range(vocab))
    for shard in shards:
        local = shard.local(config)
        assert local.num_heads > 0
        assert local.num_heads % local.num_kv_heads == 0, "the kernels want as many query heads for each KV head"
        read = {head // group for head in range(config.num_heads)[shard.heads]}
        assert read == set(range(kv_heads)[shard.kv_heads])
        ratio = local.num_heads // local.num_kv_heads
        for i, head in enumerate(range(config.num_heads)[shard.heads]):
            assert head // group == shard.kv_heads.start + i // ratio, "a query head reads another KV head than its own"


def test_the_parts_of_a_large_model_are_equal() -> None:
    for name, size in (("llama-8b", 2), ("llama-8b", 4), ("llama-70b", 4), ("llama-70b", 8)):
        config = SHAPES[name]
        local = [shard_of(config, rank, size).local(config) for rank in range(size)]
        assert all(part == local[0] for part in local)
        assert (local[0].num_heads * size, local[0].intermediate_size * size) == (
            config.num_heads,
            config.intermediate_size,
        )
        assert local[0].vocab_size * size == config.vocab_size


def test_a_step_survives_the_line() -> None:
    chunk = ChunkWork([5, 6], 3, [7, 8], 9, True, 3, [6, 7], 5)
    decode = DecodeWork(2, 700, [1, 0], [12, 13], [-5, 1 << 30], True, [[0, 1], [4, 4], [0, 1, 2], [1, 0, 0, 0, 4, 0]])
    for work in (
        StepWork(HostMoves([(1, 2)], [(3, 4)]), [(5, 6)], decode, [chunk], 0),
        StepWork(HostMoves(), [], DecodeWork(1, 1, None, [], [], False, None), [], 0),
        StepWork(HostMoves(), [], DecodeWork(5, 9, None, [], [], False, None, 3, [4, 1, 2, -1]), [], 0),
        StepWork(HostMoves(), [], None, [chunk, chunk], 1),
    ):
        back = wire.decode(wire.encode(work))
        assert isinstance(back, StepWork)
        assert wire.encode(back) == wire.encode(work)
        assert (back.decode, back.chunks, back.num_decodes) == (work.decode, work.chunks, work.num_decodes)
        for ours_, theirs in ((back.moves.out, work.moves.out), (back.moves.back, work.moves.back)):
            assert list(map(tuple, ours_)) == theirs
    move = BlockMove([3, 1], writes=True)
    assert wire.decode(wire.encode_blocks(move)) == move


# --- ranks in threads -------------------------------------------------------------------------------------------------


class Line:
    """`Leader`, to ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self.queues: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(count)]
        self.sizes: list[int] = []  # of the messages

    def send(self, data: bytes) -> None:
        self.sizes.append(len(data))
        for each in self.queues:
            each.put(data)

    def close(self) -> None:
        for each in self.queues:
            each.put(b"")

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Recorder(StateDict):
    """Notes how much of each tensor is read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: dict[str, int] = {}

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        part = super().tensor(name, rows, columns)
        self.read[name] = part.numel()
        return part


def tensors_of(model: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = ModelConfig.from_hf(model.config.to_dict())
    tied = config.tie_word_embeddings
    return config, {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def engine_over(
    model: Llama,
    line: Line | None,
    *,
    num_blocks: int,
    host_blocks: int = 0,
    disk: Path | None = None,
    admission: str = "predicted",
) -> Engine:
    if model.rotary.dynamic:
        runner = Runner(model, num_blocks, 4, host_blocks)
    else:
        runner = DeviceRunner(
            model, num_blocks, 4, host_blocks, max_num_seqs=32, max_model_len=256, graphs=False, sharing=FREE
        )
    if line is not None:
        runner.observers.append(Followers(line))  # type: ignore[arg-type]
    cache = BlockManager(num_blocks, 4, prefix_caching=disk is not None)
    scheduler = Scheduler(Admission(Preemption(cache, SwapSpace(host_blocks)), admission), 32, 48)
    requests = Requests(scheduler, None, model.config.vocab_size, min(256, num_blocks * 4), frozenset([2]))
    if disk is not None and line is not None:
        store = BlockStore(disk, identity_of(model, 4), {}, 1 << 30)
        tier = DiskTier(store, scheduler.cache, ShardedBlocks(runner, line.send), pytest.fail, runner.observers)
        tier.reader.measure = lambda step: None  # type: ignore[method-assign]  # read whatever is on disk
        runner.observers.insert(0, tier)
        scheduler.admission.disk_reads = DiskReads(tier, scheduler.cache, scheduler.idle, requests.new_seq_id)
    return Engine(runner, requests, methods_for(requests, runner))


@contextlib.contextmanager
def team(
    model: Any, size: int, *, num_blocks: int, host_blocks: int = 0, in_8_bits: bool = False, **options: Any
) -> Iterator[Engine]:
    """An engine over ``size`` ranks; all but rank 0 are threads that act as followers."""
    config, tensors = tensors_of(model)
    store, line = torch.distributed.HashStore(), Line(size - 1)

    def load(rank: int) -> Llama:
        ranks = Ranks(store, rank, size, CPU)
        part = load_llama(
            LlamaTensors(StateDict(tensors), config),
            config,
            device=CPU,
            dtype=torch.float32,
            max_positions=256,
            ranks=ranks,
        )
        return replace(part, kv_in_8_bits=in_8_bits)

    def follow(rank: int) -> None:
        try:
            engine = engine_over(load(rank), None, num_blocks=num_blocks, host_blocks=host_blocks, **options)
            blocks = ShardedBlocks(engine.runner)
            while message := line.queues[rank - 1].get():
                work = wire.decode(message)
                if isinstance(work, BlockMove):
                    blocks.follow(work)
                else:
                    engine.runner.compute(work)
        except BaseException as error:
            os.write(2, f"rank {rank}: {error!r}\n".encode())
            os._exit(1)  # the others would wait for it forever

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    engine = engine_over(load(0), line, num_blocks=num_blocks, host_blocks=host_blocks, **options)
    try:
        yield engine
    finally:
        if engine.requests.disk is not None:
            engine.requests.disk.close()
        line.close()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("parts", "total"), [((1e8, -1e8, 1.0), 1.0), ((1e8, 1.0, -1e8), 0.0), ((1.0, 1e8, -1e8), 0.0)]
)
def test_sums_keep_the_order_of_ranks(parts: tuple[float, ...], total: float) -> None:
    """In float32 the order decides whether the 1 is lost."""
    store = torch.distributed.HashStore()

    def add(rank: int) -> list[list[float]]:
        ranks = Ranks(store, rank, len(parts), CPU)
        ranks.keep_order()
        x = torch.full((5, 2), parts[rank])
        assert ranks.all_reduce(x) is x
        return x.tolist()

    with ThreadPoolExecutor(len(parts)) as pool:
        assert list(pool.map(add, range(len(parts)))) == [[[total, total]] * 5] * len(parts)


def mixed(rng: random.Random, vocab: int, count: int) -> list[tuple[list[int], Params]]:
    """Requests of every kind; some prompts begin alike."""
    prefix = [rng.randrange(3, vocab) for _ in range(13)]
    requests: list[tuple[list[int], Params]] = []
    for number in range(count):
        prompt = (prefix if number % 3 == 0 else []) + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 15))]
        length = rng.randint(2, 14)
        kinds: list[Params] = [
            SamplingParams(temperature=0, max_tokens=length),
            SamplingParams(temperature=0.8, seed=number, n=3, top_p=0.9, max_tokens=length),
            SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=length),
            SamplingParams(temperature=0, min_tokens=2, logit_bias={5: 1.0}, max_tokens=length),
            BeamSearchParams(beam_width=3, max_tokens=length),
        ]
        requests.append((prompt, kinds[number % len(kinds)]))
    return requests


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


MODELS: dict[str, dict[str, Any]] = {
    "3 KV heads, uneven": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    "2 KV heads, 6 heads, tied": {"tie_word_embeddings": True},
    "odd vocabulary and intermediate": {"vocab_size": 97, "intermediate_size": 83},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "biases of q, k and v": {"kind": "Qwen2"},
    "norms of q and k, windows": {
        "kind": "Qwen3", "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16,
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    },
    "a window, layers without rope": {
        "kind": "SmolLM3", "use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2,
    },
    "one KV head": {"num_attention_heads": 6, "num_key_value_heads": 1},
    "norms on both sides, two ropes, GELU": {
        "kind": "Gemma3", "head_dim": 16, "sliding_window": 7, "num_hidden_layers": 7, "pad_token_id": 0,
    },
    "norms on both sides, packed gate and up": {"kind": "Glm4", "head_dim": 16, "num_key_value_heads": 2},
    "norms after, layers without rope": {"kind": "Exaone4", "sliding_window": 7, "num_hidden_layers": 4},
    "packed matrices, partial rotary": {
        "kind": "Phi3", "hidden_size": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "multipliers": {
        "kind": "Granite", "embedding_multiplier": 4.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "dynamic rope": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "max_position_embeddings": 64,
    },
}  # fmt: skip


# Ranks divide sizes in the first models only: the others take turns.
@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, size) for at, kind in enumerate(MODELS) for size in (2, 4) if at < 3 or at % 2 != size // 4],
)
def test_ranks_compute_what_one_rank_computes(kind: str, size: int) -> None:
    model = hf_model(**MODELS[kind])
    requests = mixed(random.Random(size), model.config.vocab_size, 6)
    config, tensors = tensors_of(model)
    whole = load_llama(
        LlamaTensors(StateDict(tensors), config), config, device=CPU, dtype=torch.float32, max_positions=256
    )
    expected = tokens(run(engine_over(whole, None, num_blocks=200), requests))
    with team(model, size, num_blocks=200) as engine:
        assert tokens(run(engine, requests)) == expected


@pytest.mark.parametrize("kind", ["Olmo2", "Olmo3"])
def test_norms_over_all_heads_are_rejected_on_several_ranks(kind: str) -> None:
    config, _ = tensors_of(hf_model(kind=kind))
    assert shard_of(config, 0, 1).size == 1
    with pytest.raises(UsageError, match=f"{kind}ForCausalLM normalizes q and k over all heads") as caught:
        shard_of(config, 0, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["odd vocabulary and intermediate", "dynamic rope"])
def test_ranks_score_prompts_as_one_rank_does(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score in pieces of seven rows of logits, which all ranks must split alike."""
    model = hf_model(**MODELS[kind])
    monkeypatch.setattr(scores, "_PIECE", 7 * model.config.vocab_size)
    rng = random.Random(size)
    kinds: list[Params] = [
        SamplingParams(max_tokens=0, prompt_logprobs=2),
        SamplingParams(n=2, seed=1, max_tokens=5, prompt_logprobs=0),
        BeamSearchParams(beam_width=3, max_tokens=4, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=6),
    ]
    requests: list[tuple[list[int], Params]] = [
        ([rng.randrange(3, 96) for _ in range(rng.randint(1, 50))], kinds[number % 4]) for number in range(16)
    ]
    config, tensors = tensors_of(model)
    whole = load_llama(
        LlamaTensors(StateDict(tensors), config), config, device=CPU, dtype=torch.float32, max_positions=256
    )
    expected = run(engine_over(whole, None, num_blocks=200), requests)
    with team(model, size, num_blocks=60) as engine:
        found = run(engine, requests)
    assert tokens(found) == tokens(expected)
    for one, other in zip(expected, found, strict=True):
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        for ours_, theirs in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            assert (ours_ is None) == (theirs is None)
            if ours_ is not None and theirs is not None:
                assert (ours_.token_id, ours_.rank) == (theirs.token_id, theirs.rank)
                assert ours_.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@functools.cache
def uneven_heads(in_8_bits: bool) -> tuple[Any, list[Any], Any]:
    """Return a model with 3 KV heads, requests, and the tokens that the unsharded model gives."""
    model = hf_model(**MODELS["3 KV heads, uneven"])
    requests = mixed(random.Random(7), 96, 20)
    config, tensors = tensors_of(model)
    whole = load_llama(
        LlamaTensors(StateDict(tensors), config), config, device=CPU, dtype=torch.float32, max_positions=256
    )
    engine = engine_over(replace(whole, kv_in_8_bits=in_8_bits), None, num_blocks=300)
    return model, requests, tokens(run(engine, requests))


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("host_blocks", [0, 60])
def test_a_pool_that_preempts_changes_no_token(host_blocks: int, in_8_bits: bool) -> None:
    model, requests, expected = uneven_heads(in_8_bits)
    options: dict[str, Any] = {"host_blocks": host_blocks, "in_8_bits": in_8_bits, "admission": "optimistic"}
    with team(model, 2, num_blocks=40, **options) as engine:
        assert tokens(run(engine, requests)) == expected
        stats = engine.figures.cache_stats()
        assert stats.num_preemptions > 0
        assert (stats.num_swapped_in > 0) == (host_blocks > 0)


@pytest.mark.parametrize(("size", "in_8_bits"), [(2, True), (4, False)])
def test_ranks_read_their_own_heads_from_disk(tmp_path: Path, size: int, in_8_bits: bool) -> None:
    """Save blocks while the pool evicts them. A later team reads them, with 3 KV heads on 2 or 4 ranks."""
    model, requests, expected = uneven_heads(in_8_bits)
    for restart in (False, True):
        with team(model, size, num_blocks=40, disk=tmp_path, in_8_bits=in_8_bits) as engine:
            assert tokens(run(engine, requests)) == expected
            assert engine.requests.disk is not None
            assert not restart or engine.requests.disk.num_read > 20


def test_a_steady_step_sends_next_to_nothing() -> None:
    model = hf_model()
    with team(model, 2, num_blocks=64) as engine:
        run(engine, [([5, 6, 7 + i], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) for i in range(8)])
        sizes = line_of(engine).sizes
    assert engine.figures.num_steps == len(sizes)
    assert sorted(sizes)[len(sizes) // 2] < 60, "most steps change nothing but what every rank can count itself"


def test_searches_fork_on_all_ranks_at_once() -> None:
    """In steps that need no CPU, ranks get forks from rank 0's device, without a message."""
    model = hf_model()
    params = BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True)
    requests: list[tuple[list[int], Params]] = [([5, 6, 7 + i], params) for i in range(3)]
    config, tensors = tensors_of(model)
    whole = load_llama(
        LlamaTensors(StateDict(tensors), config), config, device=CPU, dtype=torch.float32, max_positions=256
    )
    expected = tokens(run(engine_over(whole, None, num_blocks=300), requests))
    with team(model, 2, num_blocks=300) as engine:
        assert tokens(run(engine, requests)) == expected
        sizes = line_of(engine).sizes
    assert engine.figures.num_steps == len(sizes) == 40
    assert sorted(sizes)[len(sizes) // 2] < 70, "a message of most steps has neither tokens nor tables"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["biases", "biases of q, k and v", "norms of q and k, windows"])
def test_a_rank_reads_only_its_part(size: int, kind: str) -> None:
    config, tensors = tensors_of(hf_model(**MODELS[kind]))

    class Alone:
        """A rank that does nothing together with others."""

        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, size

    total: dict[str, int] = {}
    for rank in range(size):
        source = Recorder(tensors)
        load_llama(
            source, config, device=CPU, dtype=torch.float32, max_positions=64, ranks=Alone(rank),  # type: ignore[arg-type]
        )  # fmt: skip
        for name, count in source.read.items():
            total[name] = total.get(name, 0) + count
    for name, shape in parameter_shapes(config):
        times = total[name] / torch.Size(shape).numel()
        if "norm" in name:
            assert times == size
        elif "k_proj" in name or "v_proj" in name:
            assert times == size / min(size, config.num_kv_heads)
        else:
            assert times == 1, name


# --- ranks in processes -----------------------------------------------------------------------------------------------

PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8)


@pytest.mark.weights
@pytest.mark.usefixtures("modules_fork")
def test_two_processes_say_what_one_says(llm: LLM) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    params: list[Params] = [GREEDY, GREEDY, BEAMS, GREEDY]
    expected = tokens(llm.generate(PROMPTS, params))
    # A pool for one request, and room on the host for a part of another: some are swapped and some computed again.
    two = LLM(
        "smollm2-135m", **options, tensor_parallel_size=2, block_size=4, num_blocks=12, swap_space_gb=0.0021,
        admission="optimistic",
    )  # fmt: skip
    outputs = two.generate(PROMPTS, params)
    assert tokens(outputs) == expected
    stats = two.cache_stats()
    assert stats.num_preemptions > 0
    assert stats.num_swapped_in > 0
    two.close()
    with pytest.raises(RankDied, match="load the model again"):
        two.generate(PROMPTS[0], GREEDY)


@pytest.mark.usefixtures("modules_fork")
def test_a_conversation_of_two_processes_goes_on_after_a_restart(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLM_DISK_CACHE", str(tmp_path))
    monkeypatch.setattr(BlockReader, "measure", lambda self, step: None)  # read whatever is on disk
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "disk_cache": "1GB", "tensor_parallel_size": 2}
    prompt, params = list(range(10, 60)), SamplingParams(temperature=0, max_tokens=8, logprobs=2)

    def check(num_cached: int) -> None:
        with LLM(str(tiny_model), **options) as llm:
            [output] = llm.generate(prompt, params)
        assert output.num_cached_tokens == num_cached
        [one], [other] = output.outputs, expected.outputs
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)

    with LLM(str(tiny_model), **{**options, "tensor_parallel_size": 1}) as llm:
        [expected] = llm.generate(prompt, params)
    check(0)  # one rank's blocks are not those of two
    paths = [Path(block.path) for block in listed(tmp_path) if block.index == 1]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # the end of rank 1's part
    check(16)
    check(48)


def line_of(engine: Engine) -> Any:
    """Rank 0's line to the others."""
    [followers] = [each for each in engine.runner.observers if isinstance(each, Followers)]
    return followers.leader


def other_ranks(llm: LLM) -> list[int]:
    return [process.pid for process in line_of(llm.engine)._lines.processes.values()]


def listening(pids: list[int]) -> set[str]:
    """Return the addresses, in hexadecimal, on which these processes listen."""
    sockets = set()
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(each))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@pytest.mark.usefixtures("own_garbage", "modules_fork")
def test_ranks_of_one_host_meet_where_nobody_else_can(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store and the collectives listen on no other interface, and no other user can write to the store."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    llm = LLM(str(tiny_model), device="cpu", tensor_parallel_size=2, num_blocks=64)
    llm.generate("hello", SamplingParams(temperature=0, max_tokens=2))
    assert listening([os.getpid(), *other_ranks(llm)]) <= {"0100007F", "0" * 24 + "01000000"}
    [directory] = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in directory.iterdir()] == ["store"]
    llm.close()
    del llm
    gc.collect()
    assert not directory.exists()


@pytest.mark.usefixtures("modules_fork")
def test_a_rank_that_is_killed_ends_the_run_with_its_name(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), device="cpu", tensor_parallel_size=2, num_blocks=64)
    [pid] = other_ranks(llm)
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankDied, match="rank 1 of 2 is gone: it died of signal 9"):
        list(stream)
    with pytest.raises(RankDied, match="rank 1 of 2 is gone"):
        llm.generate("hello", GREEDY)
    assert llm.cache_stats().used_blocks == 0


@pytest.mark.usefixtures("modules_fork")
def test_a_rank_that_fails_says_why(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), device="cpu", tensor_parallel_size=2, num_blocks=64)
    line_of(llm.engine).send(b"[]")
    wait_until_gone(other_ranks(llm)[0])
    with pytest.raises(RankDied, match="rank 1 of 2 is gone: ValueError: not enough values to unpack"):
        llm.generate("hello", GREEDY)


def test_a_rank_that_never_starts_is_reported(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.system.PYTHON", ("/bin/false",))
    with pytest.raises(MinillmError, match="rank 1 of 2 ended with exit code 1 before it was ready"):
        LLM(str(tiny_model), device="cpu", tensor_parallel_size=2)


@pytest.mark.slow
def test_the_other_ranks_end_when_rank_0_is_killed(tiny_model: Path, forking: Callable[[str], str]) -> None:
    program = f"""
from minillm import LLM
llm = LLM({str(tiny_model)!r}, device="cpu", tensor_parallel_size=2, num_blocks=64)
[leader] = [each.leader for each in llm.engine.runner.observers if hasattr(each, "leader")]
print(leader._lines.processes[1].pid, flush=True)
input()
"""
    process = subprocess.Popen(
        [forking("minillm"), "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(pid, 0)
    os.kill(process_of(process.pid), signal.SIGKILL)
    wait_until_gone(pid)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "running"])
def test_ctrl_c_ends_all_ranks(tiny_model: Path, when: str, forking: Callable[[str], str]) -> None:
    arguments = ["generate", "x", "y", "--model", str(tiny_model), "--device", "cpu", "--tensor-parallel-size", "2"]
    arguments += ["--num-blocks", "64", "--max-tokens", "100", "--ignore-eos", "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([forking("minillm"), *arguments], **pipes, start_new_session=True)
    assert process.stdout is not None
    while not (workers := _workers_of(process.pid)):
        time.sleep(0.01)
    if when == "running":
        process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate()[1]
    if when == "starting":  # otherwise it may have finished already
        assert process.returncode == 130, errors
    for pid in workers:
        wait_until_gone(pid)


def _workers_of(parent: int) -> list[int]:
    """The ranks that a process has started, ready to take signals."""
    found = []
    for pid in children(process_of(parent)):
        with contextlib.suppress(OSError):
            if b"minillm.loading.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.slow
def test_a_process_that_waits_for_a_dead_rank_is_ended() -> None:
    """A device's wait, seen from Python, is a call that does not return and hears no signal."""
    program = """
import ctypes, socket
from minillm.parallel import channel
from minillm.parallel.channel import Leader, RankConnections
channel._GRACE = 0.5
ours, theirs = socket.socketpair()
leader = Leader(RankConnections({1: ours}, {}, lambda: None))
with leader.watched():
    theirs.close()
    while True:
        ctypes.CDLL(None).sleep(60)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr == "minillm: error: rank 1 of 2 is gone: it died\n"


# --- torchrun ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_joins_its_processes(minillm_command: tuple[str, ...], tiny_model: Path) -> None:
    arguments, expected = of_two_ranks(tiny_model)
    command = torchrun(minillm_command[0], arguments)
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected


def test_processes_must_fill_whole_replicas() -> None:
    assert Torchrun(0, 6).num_replicas(2) == 3
    with pytest.raises(UsageError, match="not a multiple of tensor_parallel_size 4"):
        Torchrun(0, 6).num_replicas(4)


def test_too_many_ranks_are_refused_in_one_line(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="tensor_parallel_size 7 is too large: the model has 6 heads"):
        LLM(str(tiny_model), device="cpu", tensor_parallel_size=7)
    with pytest.raises(UsageError, match="each rank takes a GPU"):
        LLM(str(tiny_model), device="cuda:1", tensor_parallel_size=2)
    with pytest.raises(UsageError, match="tensor_parallel_size must be at least 1, not 0"):
        LLM(str(tiny_model), device="cpu", tensor_parallel_size=0)


@pytest.mark.usefixtures("modules_fork")
def test_an_error_that_all_ranks_find_is_that_of_one_process(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match=r"^weights both needs a GPU"):
        LLM(str(tiny_model), device="cpu", tensor_parallel_size=2, weights="both")
    with pytest.raises(CapacityError, match=r"^max_model_len 9999 is above the model's context"):
        LLM(str(tiny_model), device="cpu", tensor_parallel_size=2, max_model_len=9999)


@pytest.mark.parametrize("has_task", [False, True])
def test_a_rank_whose_rank_0_ends_while_it_starts_is_quiet(has_task: bool, tmp_path: Path) -> None:
    """Such as after ctrl-c. The process still imports torch when the connection ends."""
    directory, task = tmp_path / "store", {"rank": 1, "local_rank": 1, "model": "none", "config": {}}
    directory.mkdir()
    with tempfile.TemporaryFile() as log:
        connection, process = start_connected((sys.executable, "-P", "-m", "minillm.loading.rank"), log=log)
        if has_task:
            send_message(connection, json.dumps({**task, "directory": str(directory)}).encode())
        connection.close()
        assert process.wait(60) == 1
        log.seek(0)
        assert log.read() == b""
    assert directory.exists() != has_task
