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
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from minillm.errors import MinillmError, UsageError
from minillm.jobs.engines import Died, Engines, Facts, Task
from minillm.jobs.rows import Answer, InputRow, Style, num_tokens
from minillm.params import BeamSearchParams
from minillm.progress import ignore_progress
from minillm.text.chat_template import plain_messages

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
_TRIES = 4  # to start a cluster
# Settings for a cluster that this process starts, unless the user has set them: no idle worker for each core, no report
# to Ray's developers, and no killing of engines when other programs need memory.
_LOCAL = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}


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
        self._engine = _load(self._task, self._answers.put)
        return self._engine.facts()

    def submit(self, rows: list[InputRow]) -> None:
        """Let the engine answer rows."""
        for row in rows:
            self._engine.submit(row)

    def collect(self) -> list[Answer]:
        """Wait for an answer, and return all answers since the last call."""
        answers = [self._answers.get()]
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers


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

        count = len(next(iter(batch.values()), ()))
        given = [{name: column[i] for name, column in batch.items()} for i in range(count)]
        found = await asyncio.gather(*map(self._row, given))
        names = ("text", "outputs", "num_tokens", "finish_reason", "error")
        yield {**batch, **{name: np.array([each[name] for each in found]) for name in names}}

    async def _row(self, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            row = self._parsed(given)
            self._waiting[row.index] = asyncio.get_running_loop().create_future()
            self._engine.submit(row)
            answer = await self._waiting[row.index]
        except (UsageError, ValueError, TypeError) as error:
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
        own = json.loads(own or "{}") if isinstance(own, str) else dict(own or {})
        own = {name: _plain(value) for name, value in own.items() if value is not None}  # Arrow adds absent fields
        common = dict(self._engine.defaults() if self._params is None and not own else self._params or {})
        if "beam_width" in own:  # beams know fewer parameters
            common = {name: value for name, value in common.items() if name in _OF_BEAMS}
        prompt, messages = _plain(given.get("prompt")), _plain(given.get("messages"))
        if (prompt is None) == (messages is None):
            raise UsageError('a row has either "prompt" or "messages"')
        if messages is not None:
            messages = plain_messages(messages)
        return InputRow(next(self._numbers), prompt, messages, {**common, **own})


def _plain(value: Any) -> Any:
    """Return a column's value as plain Python values instead of numpy's types."""
    return value.tolist() if hasattr(value, "tolist") else value


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
        self._new: Any = ray.remote(actor).options(**_needs(task.engine, count), max_concurrency=2)
        self._calls: dict[Any, int] = {}  # pending Ray call -> number of its engine
        self._actors: dict[int, Any] = {}

    def __exit__(self, *raised: object) -> None:
        ray.shutdown()

    def start(self, number: int) -> None:
        self._calls = {call: each for call, each in self._calls.items() if each != number}
        self._actors[number] = self._new.remote(self._task)
        self._calls[self._actors[number].load.remote()] = number

    def send(self, number: int, rows: list[InputRow]) -> None:
        self._actors[number].submit.options(num_returns=0).remote(rows)

    def receive(self) -> tuple[int, Facts | list[Answer] | Died | MinillmError]:
        number = -1
        try:
            [call], _ = ray.wait(list(self._calls), num_returns=1)
            number = self._calls.pop(call)
            found = ray.get(call)
            self._calls[self._actors[number].collect.remote()] = number
            return number, found
        except ray.exceptions.RayActorError as error:
            last_line = str(error).strip().splitlines()[-1][:200]
            return number, Died("" if number in self.facts else f" while loading ({last_line})")
        except ray.exceptions.RayTaskError as error:
            return number, (UsageError if isinstance(error.cause, UsageError) else MinillmError)(str(error.cause))
        except ray.exceptions.RayError as error:
            raise MinillmError(f"the Ray cluster has failed: {_first_line(error)}") from None


def connect(address: str) -> None:
    """Connect to a cluster, or start one if ``address`` is "local". Raises UsageError if that fails."""
    options = {"include_dashboard": False} if address == "local" else {}
    if address == "local":
        os.environ.update({**_LOCAL, **os.environ})
    for tries_left in reversed(range(_TRIES)):
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, **options)
            return
        except Exception as error:
            if not tries_left or address != "local" or "timed out" not in str(error):
                what = "start a cluster" if address == "local" else "reach the cluster"
                raise UsageError(f"--ray {address}: cannot {what}: {_first_line(error)}") from None
            ray.shutdown()  # Ray gives its processes 30 s, which is too little for a busy machine


def _needs(engine: Mapping[str, Any], count: int) -> dict[str, float]:
    """Return the GPUs and cores that each engine needs, as options of a Ray actor.

    Raises UsageError if there are not enough of them for ``count`` engines.
    """
    there = ray.cluster_resources()
    size = int(engine.get("tensor_parallel_size", 1))
    on_gpus = engine.get("device", "auto") != "cpu" and there.get("GPU", 0) > 0
    kind, each = ("GPU", size) if on_gpus else ("CPU", max(1, int(there.get("CPU", 0)) // count))
    if count * each > there.get(kind, 0):
        what = "GPUs" if on_gpus else "cores"
        raise UsageError(
            f"--engines {count}: they need {count * each} {what}, and the cluster has {there.get(kind, 0):g}"
        )
    return {"num_gpus": size, "num_cpus": 1} if on_gpus else {"num_cpus": each}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
