"""Test how steps of new shapes run: no kernel compiles while a step can run otherwise. Graphs are recorded seldom."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.engine import engine_for, run
from lib.graphs import WorkGraphs
from lib.models import hf_model, ours
from minillm.kernels import DecodeInputs, KVCache
from minillm.model.llama import Batch, Llama
from minillm.params import SamplingParams
from minillm.runner.device.ahead import Ahead, Shape
from minillm.runner.device.graphs import Graphs
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.scores import ScoringForward


class NotCompiledError(Exception):
    pass


@dataclass
class Machine:
    """A compiler that knows variants by name, and the kernels that work launches."""

    compiled: set[str] = field(default_factory=set)
    impossible: set[str] = field(default_factory=set)
    pending: list[str] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    compiled_at_launch: list[str] = field(default_factory=list)
    pending_at_waits: list[list[str]] = field(default_factory=list)
    num_processes: int = 1
    rests: int = 0
    not_compiled: type[Exception] = NotCompiledError
    _found: list[str] | None = None
    _is_strict: bool = False
    _failed: set[str] = field(default_factory=set)

    def kernels(self, *names: str) -> Callable[[], list[str]]:
        """Return work that launches kernels."""

        def work() -> list[str]:
            for name in names:
                self.launch(name)
            return list(names)

        return work

    def launch(self, name: str) -> None:
        if self._found is not None:
            self._found += [name] if name not in self.compiled else []
            return
        if name not in self.compiled:
            if self._is_strict:
                raise NotCompiledError(name)
            self.compiled_at_launch.append(name)
            self.compiled.add(name)
        self.launched.append(name)

    def finish(self, count: int = 100) -> None:
        for _ in range(min(count, len(self.pending))):
            name = self.pending.pop(0)
            (self._failed if name in self.impossible else self.compiled).add(name)

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    @property
    def num_done(self) -> int:
        return len(self.compiled)

    def missing(self, work: Callable[[], object], /) -> Sequence[str]:
        found: list[str] = []
        self._found = found
        try:
            work()
        finally:
            self._found = None
        return list(dict.fromkeys(found))

    @contextmanager
    def only_compiled(self) -> Iterator[None]:
        kept, self._is_strict = self._is_strict, True
        try:
            yield
        finally:
            self._is_strict = kept

    def is_pending(self, variants: Iterable[str], /) -> bool:
        return bool(set(variants) & set(self.pending))

    def submit(self, variants: Iterable[str], /, *, urgent: bool = False) -> None:
        new = [name for name in variants if name not in self.compiled | self._failed]
        others = [name for name in self.pending if name not in new]
        self.pending = new + others if urgent else others + new

    def wait(self, variants: Iterable[str] | None = None, seconds: float | None = None) -> bool:
        self.pending_at_waits.append(list(self.pending))
        wanted = set(self.pending if variants is None else variants)
        self.pending.sort(key=lambda name: name not in wanted)
        self.finish(1 if seconds else len(wanted))
        return not self.pending

    def relax(self) -> None:
        pass

    def rest(self) -> None:
        self.rests += 1

    def close(self) -> None:
        self.pending.clear()


def idle(machine: Machine) -> Ahead:
    """Return an `Ahead` of a program that has idle moments, but had none to prepare anything."""
    ahead = Ahead(machine, prepares=True)
    ahead.advance(lambda: [Shape(machine.kernels())])
    return ahead


def test_without_idle_moments_all_kernels_of_a_step_compile_in_parallel() -> None:
    machine = Machine(compiled={"a"})
    ahead = Ahead(machine)
    assert ahead.run(machine.kernels("a", "b", "c")) == ["a", "b", "c"]
    assert machine.pending_at_waits == [["b", "c"], ["c"]]
    assert machine.launched[-3:] == ["a", "b", "c"]
    assert machine.compiled_at_launch == []
    assert not ahead.record(machine.kernels("d"), machine.kernels("d"), "graph")
    machine.finish()
    assert ahead.record(machine.kernels("d"), machine.kernels("d"), "graph")
    assert machine.compiled_at_launch == []


def test_a_step_does_not_wait_for_its_kernels() -> None:
    machine = Machine()
    ahead = idle(machine)
    work = machine.kernels("a", "b")
    machine.submit(["later"])
    assert ahead.attempt(work, key="step") is None
    ahead.search()
    assert machine.pending == ["a", "b", "later"]
    machine.finish(1)
    assert ahead.attempt(work, key="step") is None
    assert machine.launched == [], "it is not tried while kernels are pending"
    machine.finish(1)
    assert ahead.attempt(work, key="step") == (["a", "b"],)
    assert machine.pending_at_waits == []
    assert machine.compiled_at_launch == []


def test_a_kernel_that_no_other_process_can_compile_is_compiled_by_its_launch() -> None:
    machine = Machine(impossible={"never"})
    ahead, work = idle(machine), machine.kernels("a", "never")
    assert ahead.attempt(work, key="step") is None
    assert not ahead.is_compiled(work, "other")
    machine.finish()
    assert ahead.is_compiled(work, "other")
    assert ahead.attempt(work, key="step") == (["a", "never"],)
    assert machine.compiled_at_launch == ["never"]


def test_a_step_does_not_wait_for_a_kernel_that_another_one_can_replace() -> None:
    machine = Machine()

    def work() -> None:
        try:
            machine.launch("fast")
        except NotCompiledError:
            machine.launch("general")
        machine.launch("last")

    Ahead(machine).run(work)
    assert machine.pending == ["fast"]
    assert machine.launched[-2:] == ["general", "last"]
    assert machine.compiled_at_launch == []


def test_the_other_missing_kernels_are_looked_for_once() -> None:
    """Looking for them takes as long as a step, so `search` does it while the device computes."""
    machine = Machine(compiled={"a"})
    ahead = idle(machine)
    assert ahead.attempt(machine.kernels("a", "b", "c"), key="first") is None
    assert machine.pending == ["b"]
    ahead.search()
    assert sorted(machine.pending) == ["b", "c"]
    assert ahead.attempt(machine.kernels("b", "d"), key="second") is None
    ahead.search()
    assert sorted(machine.pending) == ["b", "c"], "b is queued, so nothing else was looked for"
    machine.finish()
    assert ahead.attempt(machine.kernels("b", "d"), key="second") is None
    assert machine.pending == ["d"]


def test_work_that_changes_state_is_never_interrupted() -> None:
    machine = Machine(compiled={"a"})
    work = machine.kernels("a", "b")
    assert idle(machine).run_once(work, work) == ["a", "b"]
    assert machine.launched == ["a", "b"]
    assert machine.compiled_at_launch == []


def test_idle_moments_prepare_all_shapes() -> None:
    machine = Machine(compiled={"a"}, impossible={"never"})
    recorded: list[object] = []

    def prompt() -> None:
        """Launch another kernel once the probe is compiled."""
        machine.launch("probe")
        machine.launch("fast" if "probe" in machine.compiled else "general")

    def shape(work: Callable[[], object]) -> Shape:
        def record() -> None:
            before = len(machine.launched)
            work()
            recorded.append(machine.launched[before:])

        return Shape(work, record)

    shapes = [
        shape(machine.kernels("a")),
        shape(machine.kernels("b", "c")),
        shape(machine.kernels("never")),
        shape(prompt),
        Shape(machine.kernels("d")),
    ]
    ahead = Ahead(machine, prepares=True)
    assert ahead.progress == (0, 0)
    assert ahead.advance(lambda: shapes)
    assert recorded == [["a"]]
    assert ahead.progress == (1, 5)
    while ahead.advance(lambda: shapes):
        pass
    assert recorded == [["a"], ["b", "c"], ["probe", "fast"]], "no graph with the general kernel"
    assert machine.compiled == {"a", "b", "c", "d", "probe", "general", "fast"}
    assert machine.compiled_at_launch == []
    assert ahead.progress == (5, 5)
    assert machine.rests == 1


def test_while_requests_run_graphs_are_recorded_seldom() -> None:
    machine = Machine()
    ahead, recorded = idle(machine), []

    def wants(key: str, after: int = 1) -> bool:
        return ahead.record(lambda: recorded.append(key), machine.kernels(), key, after)

    assert wants("first")
    assert not wants("second")
    for _ in range(31):
        ahead.count_step()
    assert not wants("second")
    ahead.count_step()
    assert not any(wants("third", 4) for _ in range(3))
    assert wants("third", 4)
    assert not wants("second")
    assert recorded == ["first", "third"]


def test_a_failure_ends_the_preparation() -> None:
    def fails() -> None:
        raise ValueError("no such layout")

    machine = Machine()
    ahead = Ahead(machine, prepares=True)
    with pytest.raises(ValueError, match="no such layout"):
        ahead.advance(lambda: [Shape(fails), Shape(fails)])
    assert not ahead.advance(lambda: [Shape(fails)])


def test_work_that_cannot_be_examined_runs_as_it_is() -> None:
    def fails() -> None:
        raise ValueError("no such layout")

    machine = Machine()
    with pytest.warns(UserWarning, match="first launch: ValueError: no such layout"):
        assert idle(machine).run_once(machine.kernels("a"), fails) == ["a"]
    assert machine.compiled_at_launch == ["a"]


def test_a_failed_preparation_leaves_the_runner_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("no such layout")

    engine = engine_for(ours(hf_model()), on_device=True)
    assert isinstance(engine.runner, DeviceRunner)
    engine.runner.ahead.prepares = True
    monkeypatch.setattr(engine.runner, "shapes", lambda: [Shape(print, fails), Shape(print, fails)])
    with pytest.warns(UserWarning, match="no longer prepared ahead: ValueError: no such layout"):
        assert not engine.runner.prepare_ahead()
    assert not engine.runner.prepare_ahead()
    assert len(run(engine, [([5, 7], SamplingParams(max_tokens=3))])[0].outputs[0].token_ids) == 3


def test_prompts_next_to_shared_blocks_run_without_the_kernels_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with a common beginning get the same tokens meanwhile."""
    model, common = ours(hf_model()), list(range(5, 45))
    requests = [([*common, 50 + i, 7], SamplingParams(max_tokens=12, temperature=0)) for i in range(4)]
    engine, plain = (engine_for(model, on_device=True) for _ in range(2))
    runner, machine = engine.runner, Machine(compiled={"alone"})
    shared: list[int] = []  # numbers of decoding sequences of mixed steps that read shared blocks once
    assert isinstance(runner, DeviceRunner)
    hidden = Llama.hidden

    def launch(self: Llama, batch: Batch, kv_cache: KVCache) -> Tensor:
        is_mixed = 0 < batch.num_decodes < len(batch.token_ids)
        if is_mixed:
            machine.launch("alone" if batch.shared is None else "shared")
        if machine._found is not None:
            return torch.zeros(len(batch.token_ids), self.config.hidden_size, device=self.device)
        shared.extend([batch.num_decodes] * (is_mixed and batch.shared is not None))
        return hidden(self, batch, kv_cache)

    def answers() -> dict[int, list[int]]:
        """Add two requests while two others decode. Return the tokens by request."""
        for i, request in enumerate(requests):
            engine.add_request(str(i), *request)
            for _ in range(3 * (i % 2)):
                engine.step()
        while engine.has_work:
            engine.step()
        return {int(each.request_id): each.outputs[0].token_ids for each in engine.take_finished()}

    runner.ahead.compiler, runner.prompts, runner.piecewise = machine, None, None
    runner.state.forwards = Graphs(runner.state.rows, enabled=False)
    with monkeypatch.context() as patch:
        patch.setattr(Llama, "hidden", launch)
        runner.forward = ScoringForward(model, partial(launch, model, kv_cache=runner.kv_cache))
        first = answers()
        assert machine.pending == ["shared"]
        assert not shared
        machine.finish()
        second = answers()
    expected = {i: each.outputs[0].token_ids for i, each in enumerate(run(plain, requests))}
    assert first == second == expected
    assert shared == machine.launched.count("shared") * [2]
    assert shared
    assert machine.compiled_at_launch == []


@pytest.mark.slow
def test_the_kernels_of_every_shape_are_found(compiling: Callable[..., str]) -> None:
    """Also those of shared blocks, copies and beam searches, and without a GPU."""
    pytest.importorskip("triton")
    found = json.loads(compiling(Path(__file__).with_name("tracing.py")))
    assert found.keys() >= {
        "_begin_decode_kernel", "_end_decode_kernel", "_paged_attention_kernel", "_prefill_attention_kernel",
        "_chunk_first_kernel", "_sequence_first_kernel", "_merge_results_kernel", "_move_blocks_kernel",
        "_choose_beams_kernel", "_fork_rows_kernel", "_penalize_kernel", "_mask_kernel", "_draw_kernel",
    }  # fmt: skip


@pytest.mark.parametrize("recorded", [(), (1, 8), (40,)])
def test_decoding_runs_on_other_graphs_until_its_own_is_recorded(
    recorded: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests get the same tokens. Larger graphs compute padding, although rows have had other sequences before."""
    model = ours(hf_model())
    requests = [([5 + i, 7, 11, 3 * i + 4][: 2 + i % 3], SamplingParams(max_tokens=4 + 3 * i, temperature=0, seed=i))
                for i in range(7)]  # fmt: skip
    engine, plain = (engine_for(model, on_device=True, sharing=None, max_num_seqs=8) for _ in range(2))
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    graphs = runner.state.forwards = WorkGraphs(runner.state.rows)
    records = [(shape, shape.record) for shape in runner.decode.shapes()]
    some: list[Shape] = [
        shape for shape, record in records if isinstance(record, partial) and record.args[0][0] in recorded
    ]
    runner.ahead.prepares = True
    monkeypatch.setattr(runner, "shapes", lambda: some)
    while runner.prepare_ahead():
        pass
    runner.ahead._steps = -10_000  # no recording while requests run
    kept = list(graphs._recorded)
    got, expected = run(engine, requests), run(plain, requests)
    assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in expected]
    assert list(graphs._recorded) == kept
    ran = {key[0] for key in graphs.ran if isinstance(key, tuple)}
    assert ran == {(): set(), (1, 8): {1, 8}, (40,): set()}[recorded], "a much larger graph is slower than no graph"


def test_decoding_runs_on_the_kernels_of_more_sequences_until_its_own_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ours(hf_model())
    requests = [([5 + i, 7, 11], SamplingParams(max_tokens=4 + 3 * i, temperature=0)) for i in range(3)]
    engine, plain = (engine_for(model, on_device=True, sharing=None, max_num_seqs=8) for _ in range(2))
    runner, machine = engine.runner, Machine(compiled={"40"})
    assert isinstance(runner, DeviceRunner)
    sizes: list[int] = []
    state: Any = runner.state
    gather, forward = state.gather, state.forward

    def launch(inputs: DecodeInputs, size: int, blocks: int, shared: None) -> None:
        machine.launch(str(size))
        if machine._found is None:
            sizes.append(size)
            forward(inputs, size, blocks, shared)

    # Nothing is launched to find the kernels of a step.
    state.gather = lambda size: gather(size) if machine._found is None else None
    state.forward = launch
    state.forwards = WorkGraphs(state.rows)
    runner.ahead.compiler, runner.ahead.prepares = machine, True
    monkeypatch.setattr(runner, "shapes", list)
    runner.prepare_ahead()
    runner.ahead._steps = -10_000
    got = run(engine, requests)
    assert set(sizes) == {40}
    assert machine.pending
    machine.finish()
    got += run(engine, [(prompt, replace(params, seed=1)) for prompt, params in requests])
    assert set(sizes) > {40}
    assert machine.compiled_at_launch == []
    expected = run(plain, requests) * 2
    assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in expected]
