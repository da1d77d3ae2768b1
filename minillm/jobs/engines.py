"""Engines that answer rows (prompts of a file): one in this process, or several that are restarted when they die."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from minillm.errors import MinillmError
from minillm.jobs.rows import Answer, InputRow, Style, as_json
from minillm.llm import LLM, refusal
from minillm.params import Params
from minillm.text.prompts import Prompt

_MOST_DEATHS = 3  # maximum number of times that an engine may die without an answer in between


@dataclass(frozen=True)
class Task:
    """The setup of an engine.

    Attributes:
        model, engine: the arguments of `minillm.llm.LLM`.
        style: how to turn rows into prompts.
    """

    model: str | None
    engine: Mapping[str, Any]
    style: Style


@dataclass(frozen=True)
class Facts:
    """Facts about an engine that is ready.

    Attributes:
        defaults: the model's own sampling defaults.
        max_num_seqs: maximum sequences computed at a time.
        device: "cpu" or "cuda".
    """

    defaults: Mapping[str, Any]
    max_num_seqs: int
    device: str

    @classmethod
    def of(cls, llm: LLM) -> Facts:
        return cls(llm.engine.defaults, llm.config.max_num_seqs, llm.engine.runner.model.device.type)


class RowEngine:
    """Answers rows with one engine. Rows may arrive at any time, and join the engine's running batch.

    Any thread may call `submit` and `close`. One thread iterates over `work`.
    """

    def __init__(self, llm: LLM, style: Style) -> None:
        self._llm, self._style = llm, style
        self._rows: queue.SimpleQueue[InputRow | None] = queue.SimpleQueue()
        self._num_running = 0
        self._closed = False

    def submit(self, row: InputRow) -> None:
        """Queue a row."""
        self._rows.put(row)

    def close(self) -> None:
        """End `work` as soon as the rows submitted so far are answered."""
        self._rows.put(None)

    def work(self) -> Generator[Answer, None, None]:
        """Yield each row's answer when it is finished. End when `close` was called and all rows are answered.

        If a row fails, its answer contains the error. An exception means that the engine itself failed. Closing the
        iterator early aborts the running rows.
        """
        for row, output in self._llm.work_off(self._take, lambda row, error: refusal(row.prompt or "", error)):
            self._num_running -= 1
            yield as_json(row, output, self._llm.engine.tokenizer)

    def _take(self, room: int) -> list[tuple[InputRow, Callable[[], tuple[Prompt, Params]]]] | None:
        taken: list[tuple[InputRow, Callable[[], tuple[Prompt, Params]]]] = []
        while len(taken) < room and not self._closed:
            try:
                row = self._rows.get(block=not taken and not self._num_running)
            except queue.Empty:
                break
            if row is None:
                self._closed = True
            else:
                taken.append((row, partial(self._style.request, row, self._llm)))
        self._num_running += len(taken)
        return None if not taken and not self._closed else taken


class Engines(ABC):
    """Several engines, numbered from 0.

    Attributes:
        facts: the facts of the engines that are ready, by number.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.facts: dict[int, Facts] = {}

    @abstractmethod
    def send(self, number: int, rows: list[InputRow]) -> None:
        """Send rows to an engine that is ready."""

    @abstractmethod
    def receive(self) -> tuple[int, list[Answer] | None]:
        """Wait until an engine has answers, becomes ready, or dies. Return its number and its answers.

        The answers are an empty list if the engine has become ready. They are None if it has died, and its unanswered
        rows are lost. Raises MinillmError if an engine cannot be started.
        """

    def defaults(self) -> Mapping[str, Any]:
        """Wait until an engine is ready, and return the model's sampling defaults.

        Raises MinillmError if too many engines die while they load the model.
        """
        deaths = 0
        while not self.facts:
            if self.receive()[1] is None and (deaths := deaths + 1) > _MOST_DEATHS:
                raise MinillmError(f"engines have died {deaths} times while loading the model")
        return next(iter(self.facts.values())).defaults

    def answers(self, rows: list[InputRow]) -> Iterator[Answer]:
        """Yield each row's answer once, in the order in which rows finish.

        If an engine dies, its unanswered rows go to other engines, or to this engine once it is restarted.

        While many rows are left, an engine gets many rows at a time. Near the end it gets single rows, so that all
        engines finish together (guided self-scheduling, Polychronopoulos and Kuck 1987). Raises MinillmError if an
        engine dies again and again.
        """
        waiting = deque(rows)
        given: list[dict[int, InputRow]] = [{} for _ in range(self.count)]
        deaths = [0] * self.count
        while waiting or any(given):
            for number, facts in self.facts.items():
                room = facts.max_num_seqs - len(given[number])
                some = [waiting.popleft() for _ in range(min(room, -(-len(waiting) // (2 * self.count))))]
                if some:
                    given[number] |= {row.index: row for row in some}
                    self.send(number, some)
            number, answers = self.receive()
            if answers is None:
                waiting.extendleft(reversed(given[number].values()))
                given[number] = {}
                deaths[number] += 1
                if deaths[number] > _MOST_DEATHS:
                    raise MinillmError(f"engine {number} has died {deaths[number]} times without an answer between")
            for answer in answers or ():
                if given[number].pop(answer["index"], None) is not None:
                    deaths[number] = 0
                    yield answer
