"""Hypothesis drives an engine over a pool that is too small: requests, aborts, pins, held sequences, in any order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lib.cache_checks import check, check_swap
from lib.engine import engine_for
from lib.examples import examples
from lib.models import DEVICE, hf_model, ours
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.errors import CapacityError
from minillm.model.llama import Llama
from minillm.params import BeamSearchParams, SamplingParams
from minillm.sequence import Sequence

DISK = tempfile.TemporaryDirectory()  # all examples share it, so they find blocks of earlier ones
MODELS: list[Llama] = []  # one for all examples: making it takes longer than running them
KINDS = (
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0, max_tokens=12, stop_token_ids=list(range(3, 40))),
    SamplingParams(n=3, seed=1, max_tokens=6),
    SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=7),
    BeamSearchParams(beam_width=3, max_tokens=6),
    SamplingParams(n=4, seed=2, max_tokens=20),  # most of the pool
    SamplingParams(n=2, seed=3, max_tokens=5, prompt_logprobs=1),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
)
PREFIX = list(range(40, 60))


class EngineMachine(RuleBasedStateMachine):
    """After any series of events the bookkeeping is right, requests end, and answers are as in a batch of one."""

    @initialize(
        on_device=st.booleans(),
        block_size=st.sampled_from([1, 4]),
        host_blocks=st.sampled_from([0, 60]),
        admission=st.sampled_from(["predicted", "optimistic"]),
        on_disk=st.booleans(),
    )
    def start(self, on_device: bool, block_size: int, host_blocks: int, admission: str, on_disk: bool) -> None:
        if not MODELS:
            # In float64 a batch of another size rounds alike once it is cut to float32: in float32 about one draw in
            # 10^5 is so near a tie that it comes out differently.
            MODELS.append(ours(hf_model(), dtype=torch.float32 if DEVICE.type == "cuda" else torch.float64))
        self.engine = engine_for(
            MODELS[0], num_blocks=30 * (4 // block_size), block_size=block_size, max_num_seqs=8,
            max_num_batched_tokens=16, host_blocks=host_blocks, admission=admission, on_device=on_device,
            disk=Path(DISK.name) / str(on_device) if on_disk else None,
        )  # fmt: skip
        self.on_device = on_device
        self.requests: dict[str, tuple[list[int], Any]] = {}
        self.aborted: set[str] = set()
        self.groups: dict[str, Any] = {}
        self.idle: list[Sequence] = []
        self.pinned: list[Sequence] = []
        self.number = 0

    @rule(shared=st.integers(0, 20), own=st.lists(st.integers(3, 95), min_size=1, max_size=8),
          kind=st.sampled_from(KINDS), hold=st.booleans())  # fmt: skip
    def add(self, shared: int, own: list[int], kind: Any, hold: bool) -> None:
        name, prompt = str(self.number), PREFIX[:shared] + own
        self.number += 1
        try:
            group = self.engine.add_request(name, prompt, kind, hold=hold)
        except CapacityError:
            return  # it could never fit beside the pinned blocks
        self.requests[name] = (prompt, kind)
        if hold:
            self.groups[name] = group

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.collect()

    def collect(self) -> None:
        for output in self.engine.take_finished():
            prompt, kind = self.requests.pop(output.request_id)
            assert output.error is None, output.error
            if output.request_id not in self.aborted:
                assert all(completion.finish_reason != "abort" for completion in output.outputs)
                assert [c.token_ids for c in output.outputs] == answer(prompt, kind, self.on_device), (prompt, kind)
            group = self.groups.pop(output.request_id, None)
            if group is not None:
                self.idle += [each for each in group.sequences if each.seq_id in self.engine.scheduler.idle.idle]

    # When blocks from the disk arrive differs between runs. So neither draws nor preconditions depend on the requests:
    # Hypothesis must get the same choices when it repeats an example.

    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        if self.requests:
            name = sorted(self.requests)[index % len(self.requests)]
            self.engine.abort(name)
            self.aborted.add(name)

    @rule(index=st.integers(0, 99))
    def pin(self, index: int) -> None:
        if not self.idle:
            return
        sequence = self.idle.pop(index % len(self.idle))
        if sequence.seq_id not in self.engine.scheduler.idle.idle:  # pressure took it
            idle_sequences.release(Driver(self.engine), sequence)
            return
        try:
            idle_sequences.pin(Driver(self.engine), sequence)
            self.pinned.append(sequence)
        except CapacityError:
            idle_sequences.release(Driver(self.engine), sequence)

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            idle_sequences.unpin(Driver(self.engine), self.pinned.pop())

    @rule()
    def forget_prefixes(self) -> None:
        self.engine.cache.reset_prefix_cache()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            check(self.engine.cache)
            check_swap(self.engine.scheduler.preemption.swap)
            for sequence in self.pinned:
                assert sequence.table is not None, "pressure took a pinned prefix"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.engine.step()
            self.collect()
        assert not self.engine.has_work, "a request never ends"
        assert not self.requests
        for sequence in self.idle:
            idle_sequences.release(Driver(self.engine), sequence)
        while self.pinned:
            idle_sequences.unpin(Driver(self.engine), self.pinned.pop())
        self.books_balance()
        reads = self.engine.scheduler.admission.disk_reads
        if reads is not None:
            reads.tier.close()
            assert not reads.active
        assert self.engine.cache.num_free == self.engine.cache.num_blocks, "blocks leaked"
        assert (swap := self.engine.scheduler.preemption.swap).num_free == swap.num_blocks, "host blocks leaked"


ANSWERS: dict[tuple[tuple[int, ...], int, bool], list[list[int]]] = {}


def answer(prompt: list[int], kind: Any, on_device: bool) -> list[list[int]]:
    """Return the tokens that the request gives alone, in a pool with room for everything.

    Beams of the host and of the device round their log-probabilities in different places, so that two candidates of
    float32 scores within 1e-7 can change places between them. Each is compared with itself.
    """
    key = (tuple(prompt), KINDS.index(kind), on_device)
    if key not in ANSWERS:
        engine = engine_for(MODELS[0], num_blocks=128, on_device=on_device)
        engine.add_request("alone", prompt, KINDS[key[1]])
        while engine.has_work:
            engine.step()
        [output] = engine.take_finished()
        ANSWERS[key] = [completion.token_ids for completion in output.outputs]
    return ANSWERS[key]


EngineMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase
