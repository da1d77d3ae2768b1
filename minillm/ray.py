"""minillm on a Ray cluster: `Generate` for Ray Data, and the engines of ``minillm generate --ray``.

Needs ``minillm[ray]``. Every machine of the cluster needs minillm. It also needs the model's files, or access to
download them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from minillm.checks import shown
from minillm.errors import MinillmError, UsageError
from minillm.jobs.engines import Died, Engines, Facts, Task
from minillm.jobs.rows import Answer, InputRow, Style, num_tokens
from minillm.params import BeamSearchParams
from minillm.progress import ignore_progress
from minillm.text.chat_template import plain_messages
from minillm.text.safe import parse_json

try:
    import ray
except ModuleNotFoundError:
    raise UsageError(
        "Ray is not installed: pip install '.[ray]' in minillm's directory, or pip install 'ray[data]'"
    ) from None

if TYPE_CHECKING:
    import numpy as np

    from minillm.jobs.row_engine import RowEngine

_OF_BEAMS = {each.name for each in fields(BeamSearchParams)}
# Settings of a cluster that this process starts, unless the user has set them. Off: an idle worker for each core,
# reports to Ray's developers, killing engines when other programs need memory, metrics. Slower: two timers, in ms.
_LOCAL = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_raylet_check_gc_period_milliseconds": "5000",
    "RAY_local_fs_monitor_interval_ms": "5000",
}
# Methods that start processes without use here: an autoscaler, a reader of log files, and the dashboard's server.
_UNUSED: Any = dict.fromkeys(("start_monitor", "start_log_monitor", "start_api_server"), lambda *_, **__: None)


def _load(task: Task, deliver: Callable[[Answer], object]) -> RowEngine:
    """Load an engine. A thread calls ``deliver`` with each answer. If the engine fails, the process ends."""
    from minillm.jobs.row_engine import RowEngine  # not at the top: the driver needs no torch
    from minillm.llm import LLM

    engine = RowEngine(LLM(task.model, on_progress=ignore_progress, **task.engine), task.style)

    def work() -> None:
        try:
            for answer in engine.work():
                deliver(answer)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # Ray reports the actor's death

    threading.Thread(target=work, daemon=True).start()
    return engine


class _Actor:
    """The Ray actor that runs one engine of `RayEngines`."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def load(self) -> Facts:
        """Load the model. This is not done in the constructor, because Ray would hide the MinillmError of a failure."""
        import torch  # noqa: F401  (reads OMP_NUM_THREADS)

        if os.environ.get("OMP_NUM_THREADS") == f"{ray.get_runtime_context().get_assigned_resources().get('CPU', 0):g}":
            del os.environ["OMP_NUM_THREADS"]  # set by Ray; without it, minillm follows the free cores
        self._engine = _load(self._task, self._answers.put)
        return self._engine.facts()

    def exchange(self, rows: list[InputRow]) -> list[Answer]:
        """Let the engine answer ``rows`` as well. Wait for an answer, and return all answers since the last call.

        There must be a row without answer. The main thread waits, so that it does not look for signals every 10 ms.
        """
        for row in rows:
            self._engine.submit(row)
        first = self._answers.get()
        return [first, *(self._answers.get() for _ in range(self._answers.qsize()))]


class Generate:
    """A class for `ray.data.Dataset.map_batches`. Each actor has one model, and rows of all its batches run together.

    Rows have "prompt" (text or token ids) or "messages" (a list of ``{"role": …, "content": …}``). The optional
    "params" is a dictionary, or its JSON, that overrides the constructor's ``params``. Other columns pass through. New
    columns are "text" (of the first completion, which is the best beam), "outputs" (JSON of all completions),
    "num_tokens", "finish_reason" and "error". If a row fails, only its "error" is not empty.

    Args:
        model: see `minillm.llm.LLM`.
        params: fields of SamplingParams, or of BeamSearchParams; by default the model's own.
        chat, system, parse_special: see `minillm.jobs.rows.Style`.
        engine: options of EngineConfig.

    Example:
        model = {"model": "smollm2-135m"}
        ds.map_batches(Generate, fn_constructor_kwargs=model, batch_size=64, concurrency=4, num_gpus=1)
    """

    def __init__(
        self,
        model: str | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        chat: bool = False,
        system: str | None = None,
        parse_special: bool = False,
        **engine: Any,
    ) -> None:
        self._params, self._numbers = params, itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}  # by the row's number
        self._engine = _load(Task(model, engine, Style(chat, system, parse_special)), self._deliver)

    async def __call__(self, batch: dict[str, np.ndarray]) -> AsyncIterator[dict[str, np.ndarray]]:
        """Answer a batch of rows, given as columns. Yield the batch with the new columns."""
        import numpy as np

        given = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        found = await asyncio.gather(*map(self._row, given))
        names = ("text", "outputs", "num_tokens", "finish_reason", "error")
        yield {**batch, **{name: np.array([each[name] for each in found]) for name in names}}

    async def _row(self, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            row = self._parsed(given)
            self._waiting[row.index] = asyncio.get_running_loop().create_future()
            self._engine.submit(row)
            answer = await self._waiting[row.index]
        except (UsageError, ValueError, TypeError, RecursionError) as error:
            return {"text": "", "outputs": "[]", "num_tokens": 0, "finish_reason": "", "error": str(error)}
        first = answer["outputs"][0] if answer["outputs"] else {"text": "", "finish_reason": ""}
        return {
            "text": first["text"],
            "outputs": json.dumps(answer["outputs"]),
            "num_tokens": num_tokens(answer),
            "finish_reason": first["finish_reason"] or "",
            "error": answer["error"] or "",
        }

    def _deliver(self, answer: Answer) -> None:
        future = self._waiting.pop(answer["index"])
        future.get_loop().call_soon_threadsafe(future.set_result, answer)

    def _parsed(self, given: Mapping[str, Any]) -> InputRow:
        own = given.get("params")
        try:
            own = parse_json(own or "{}") if isinstance(own, str) else own
        except ValueError as error:
            raise UsageError(f"params is not JSON: {error}") from None
        own = {} if own is None else own
        if not isinstance(own, Mapping):
            raise UsageError(f"params must be an object, not {shown(own)}")
        own = {name: _plain(value) for name, value in own.items() if value is not None}  # Arrow adds absent fields
        common = dict(self._engine.defaults() if self._params is None and not own else self._params or {})
        if "beam_width" in own:  # beams know fewer parameters
            common = {name: value for name, value in common.items() if name in _OF_BEAMS}
        prompt, messages = _plain(given.get("prompt")), _plain(given.get("messages"))
        if (prompt is None) == (messages is None):
            raise UsageError('a row has either "prompt" or "messages"')
        messages = None if messages is None else plain_messages(messages)
        return InputRow(next(self._numbers), prompt, messages, {**common, **own})


def _plain(value: Any) -> Any:
    """Return a column's value as plain Python values instead of numpy's types, at every depth."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


class RayEngines(Engines):
    """Engines in actors of a Ray cluster. If an actor or its node dies, another actor replaces it.

    Args:
        address: "local" starts a cluster on this machine for this process. "auto", "HOST:PORT" and "ray://HOST:PORT"
            connect to a running cluster.
        actor: the class of the actors.

    Raises:
        UsageError: the cluster cannot be reached, or has fewer GPUs or cores than the engines need.
    """

    def __init__(self, task: Task, count: int, address: str, actor: type = _Actor) -> None:
        super().__init__(count)
        connect(address)
        self._task = ray.put(task)
        self._new: Any = ray.remote(actor).options(**_needs(task.engine, count))
        self._calls: dict[Any, int] = {}  # pending Ray call -> number of its engine
        self._actors: dict[int, Any] = {}

    def __exit__(self, *raised: object) -> None:
        ray.shutdown()

    def start(self, number: int) -> None:
        self._calls = {call: each for call, each in self._calls.items() if each != number}
        self._actors[number] = self._new.remote(self._task)
        self._calls[self._actors[number].load.remote()] = number

    def send(self, number: int, rows: list[InputRow]) -> None:
        self._calls[self._actors[number].exchange.remote(rows)] = number

    def receive(self) -> tuple[int, Facts | list[Answer] | Died | MinillmError]:
        for number, rows in enumerate(self._given):
            if rows and number not in self._calls.values():
                self.send(number, [])  # only to wait for answers
        number = -1
        try:
            [call], _ = ray.wait(list(self._calls), num_returns=1)
            number = self._calls.pop(call)
            return number, ray.get(call)
        except ray.exceptions.RayActorError as error:
            last_line = str(error).strip().splitlines()[-1][:200]
            return number, Died("" if number in self.facts else f" while loading ({last_line})")
        except ray.exceptions.RayTaskError as error:
            return number, (UsageError if isinstance(error.cause, UsageError) else MinillmError)(str(error.cause))
        except ray.exceptions.RayError as error:
            raise MinillmError(f"the Ray cluster has failed: {_first_line(error)}") from None


def connect(address: str) -> None:
    """Connect to a cluster, or start one if ``address`` is "local". Raises UsageError if that fails."""
    local = address == "local"
    _check(address)
    if local:
        os.environ.update({**_LOCAL, **os.environ})
    for tries_left in (3, 2, 1, 0):
        try:
            with patch.multiple("ray._private.node.Node", create=True, **_UNUSED):
                dashboard = False if local else None
                ray.init(address=address, include_dashboard=dashboard, logging_level="ERROR", log_to_driver=False)
            return
        except Exception as error:
            if not (tries_left and local) or "timed out" not in str(error):
                what = "start a cluster" if local else "reach the cluster"
                raise UsageError(f"--ray {address}: cannot {what}: {_first_line(error)}") from None
            ray.shutdown()  # Ray gives its processes 30 s, which is too little for a busy machine


def _check(address: str) -> None:
    """Raise UsageError if nothing listens at ``address``. (Ray would report that after three minutes.)"""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise UsageError(f"--ray {address}: cannot reach the cluster: {error}") from None


def _needs(engine: Mapping[str, Any], count: int) -> dict[str, float]:
    """Return the GPUs and cores that each engine needs, as options of a Ray actor.

    Raises UsageError if there are not enough of them for ``count`` engines.
    """
    there = ray.cluster_resources()
    size = int(engine.get("tensor_parallel_size", 1))
    on_gpus = engine.get("device", "auto") != "cpu" and there.get("GPU", 0) > 0
    kind, each, what = ("GPU", size, "GPUs") if on_gpus else ("CPU", max(1, int(there.get("CPU", 0)) // count), "cores")
    if count * each > (most := there.get(kind, 0)):
        raise UsageError(f"--engines {count}: they need {count * each} {what}, and the cluster has {most:g}")
    return {"num_gpus": size, "num_cpus": 1} if on_gpus else {"num_cpus": each}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
