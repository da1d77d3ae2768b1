"""An engine around a model, run to its end."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.cache_checks import check, check_swap
from minillm.blockstore.files import BlockStore
from minillm.blockstore.tier import DiskTier
from minillm.cache import BlockManager, SwapSpace
from minillm.engine.admission import Admission
from minillm.engine.disk_reads import DiskReads
from minillm.engine.engine import Engine
from minillm.engine.preemption import Preemption
from minillm.engine.requests import Requests
from minillm.engine.scheduler import Scheduler
from minillm.kernels import Costs
from minillm.kernels.attention.plan import FREE
from minillm.loading.engine import methods_for
from minillm.model.kv_cache import new_kv_cache
from minillm.model.llama import Batch, Llama
from minillm.outputs import RequestOutput
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.pool_blocks import PoolBlocks
from minillm.runner.runner import Runner
from minillm.runner.scores import ScoringForward
from minillm.service.conversations import Conversations
from minillm.speculation.drafter import Drafter
from minillm.text.tokenizer import Tokenizer


def check_cache(engine: Engine) -> None:
    """Raise AssertionError unless the bookkeeping is consistent, and tables have slots for computed tokens only.

    While a step is under way, tables also have slots for its draft tokens.
    """
    check(engine.cache)
    check_swap(engine.scheduler.preemption.swap)
    for sequence in (each for group in engine.scheduler.running for each in group.computing):
        assert sequence.num_pending or sequence.own_table.num_tokens == sequence.num_computed


def step(conversations: Conversations) -> None:
    """Compute a step of the engine, and pass its results to the conversations."""
    engine = conversations.engine
    conversations.take(engine.step(), engine.take_finished())


def everything_is_back(engine: Engine) -> None:
    check_cache(engine)
    assert engine.cache.num_free == engine.cache.num_blocks, "blocks leaked"
    assert (swap := engine.scheduler.preemption.swap).num_free == swap.num_blocks, "host blocks leaked"
    assert not engine.requests.groups
    assert not engine.scheduler.running


def engine_for(
    model: Llama,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 64,
    tokenizer: Tokenizer | None = None,
    eos: frozenset[int] = frozenset(),
    seed: int = 0,
    prefix_caching: bool = True,
    host_blocks: int = 0,
    admission: str = "predicted",
    on_device: bool | None = None,
    sharing: Costs | None = FREE,
    speculate: str = "off",
    draft: Llama | None = None,
    disk: Path | None = None,
    disk_limit: int = 1 << 30,
) -> Engine:
    """Return a new engine. ``on_device`` keeps the state of decoding sequences on the device (by default: on a GPU).

    On the device, blocks that sequences share are always read once, unless ``sharing`` says otherwise or the model is
    deterministic. ``draft``: a model that proposes draft tokens. ``disk``: the directory of a disk cache with a quota
    of ``disk_limit`` bytes, see `tier_of`.
    """
    cache = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
    scheduler = Scheduler(
        Admission(Preemption(cache, SwapSpace(host_blocks)), admission), max_num_seqs, max_num_batched_tokens
    )
    max_model_len = min(model.rotary.cos.shape[0], num_blocks * block_size)
    dynamic, on_gpu = model.rotary.dynamic, model.device.type == "cuda"
    sizes = (num_blocks, block_size, host_blocks)

    def new_runner(model: Llama, sharing: Costs | None) -> Runner:
        if not (on_gpu if on_device is None else on_device) or model.rotary.dynamic:
            return Runner(model, *sizes)
        return DeviceRunner(
            model, *sizes, max_num_seqs=max_num_seqs, max_model_len=max_model_len, graphs=on_gpu, sharing=sharing
        )

    runner = new_runner(model, None if model.is_deterministic else sharing)
    if draft is not None:
        drafter = Drafter(new_runner(draft, None), num_blocks, host_blocks, model, max_num_batched_tokens)
        drafter.draft_cost = 0.05  # as of a small one
        runner.observers.append(drafter)
        speculate = "a model"
    plain = model.config.max_position_embeddings if dynamic else None
    requests = Requests(scheduler, tokenizer, model.config.vocab_size, max_model_len, eos, plain)
    if disk is not None:
        store = BlockStore(disk, identity_of(model, block_size), {}, disk_limit)
        pool = PoolBlocks(runner.kv_cache.tensors, block_size)
        tier = DiskTier(store, cache, pool, pytest.fail, runner.observers)
        tier.reader.rates = dict.fromkeys(tier.reader.rates, 0.0)  # unknown: read whatever is on disk
        tier.reader.measure = lambda step: None  # type: ignore[method-assign]
        runner.observers.append(tier)
        scheduler.admission.disk_reads = DiskReads(tier, cache, scheduler.idle, requests.new_seq_id)
    return Engine(runner, requests, methods_for(requests, runner, seed, speculate))


def identity_of(model: Llama, block_size: int) -> bytes:
    """Return the identity of the blocks on disk, see `minillm.blockstore.keys.root`."""
    return hashlib.sha256(f"{block_size} {model.dtype} {model.kv_in_8_bits}".encode()).digest()


def tier_of(engine: Engine) -> DiskTier:
    assert engine.requests.disk is not None
    return engine.requests.disk


def logits_in_chunks(model: Llama, token_ids: list[int], chunks: list[int], block_size: int = 4) -> Tensor:
    """Return the logits of every position, ``[tokens, vocab]``, computed in ``chunks`` over a shuffled pool of NaN."""
    num_blocks = 2 * (-(-len(token_ids) // block_size))
    kv_cache = new_kv_cache(model, num_blocks, block_size)
    for tensor in kv_cache.tensors:
        tensor.fill_(99 if tensor.dtype == torch.int8 else float("nan"))
    device = model.device
    blocks = random.Random(0).sample(range(num_blocks), num_blocks // 2)
    assert sum(chunks) == len(token_ids)
    rows, start = [], 0
    for count in chunks:
        positions = list(range(start, start + count))
        decode = count == 1 and start > 0
        batch = Batch(
            token_ids=torch.tensor(token_ids[start : start + count], device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(
                [blocks[i // block_size] * block_size + i % block_size for i in positions], device=device
            ),
            block_tables=torch.tensor([blocks], dtype=torch.int32, device=device),
            context_lens=torch.tensor([start + count], dtype=torch.int32, device=device),
            num_decodes=1 if decode else 0,
            cu_seqlens=torch.tensor([0] if decode else [0, count], dtype=torch.int32, device=device),
            logit_rows=torch.arange(count, device=device),
            rope_lengths=[len(token_ids)] * count if model.rotary.dynamic else None,
        )
        with torch.inference_mode():
            rows.append(model.forward(batch, kv_cache))
        start += count
    return torch.cat(rows).cpu()


def run(engine: Engine, requests: list[tuple[list[int], Any]]) -> list[RequestOutput]:
    """Run requests together. Check the bookkeeping after every step, and that everything is freed at the end."""
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    outputs = {}
    while engine.has_work:
        engine.step()
        check_cache(engine)
        outputs.update({output.request_id: output for output in engine.take_finished()})
    assert engine.cache.num_free == engine.cache.num_blocks, "blocks leaked"
    assert (swap := engine.scheduler.preemption.swap).num_free == swap.num_blocks, "host blocks leaked"
    return [outputs[str(number)] for number in range(len(requests))]


def change_logits(monkeypatch: pytest.MonkeyPatch, change: Callable[[Batch, Tensor], Tensor]) -> None:
    """Let ``change`` replace the logits of every forward pass, given the batch: of graphs, and of all other steps."""
    for owner, name in ((Llama, "forward"), (ScoringForward, "__call__")):
        original = getattr(owner, name)

        def changed(
            self: Any, batch: Batch, *rest: Any, original: Callable[..., Tensor] = original, **named: Any
        ) -> Tensor:
            return change(batch, original(self, batch, *rest, **named))

        monkeypatch.setattr(owner, name, changed)
