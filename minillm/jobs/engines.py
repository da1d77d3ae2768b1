"""Several engines in other processes that answer rows (prompts of a file), and are restarted when they die."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from minillm.errors import MinillmError, UsageError
from minillm.jobs.rows import Answer, InputRow, Style
from minillm.progress import say

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


@dataclass(frozen=True)
class Died:
    """An engine has died. ``how`` ends the message about it, such as " of signal 9"."""

    how: str = ""


class Engines(ABC):
    """Several engines, numbered from 0. The ``with`` statement starts them, and ends them with all their processes.

    Attributes:
        facts: the facts of the engines that are ready, by number.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.facts: dict[int, Facts] = {}
        self._waiting: deque[InputRow] = deque()
        self._given: list[dict[int, InputRow]] = [{} for _ in range(count)]  # by the row's index
        self._deaths = [0] * count

    def __enter__(self) -> Self:
        for number in range(self.count):
            self.start(number)
        return self

    @abstractmethod
    def __exit__(self, *raised: object) -> None: ...

    @abstractmethod
    def start(self, number: int) -> None:
        """Start an engine, for the first time or in place of one that has died."""

    @abstractmethod
    def send(self, number: int, rows: list[InputRow]) -> None:
        """Send rows to an engine that is ready."""

    @abstractmethod
    def receive(self) -> tuple[int, Facts | list[Answer] | Died | MinillmError]:
        """Wait until an engine becomes ready, has answers, dies, or fails. Return its number and the event.

        The rows of an engine that has died are lost. A failure is one that restarting the engine cannot mend.
        """

    def defaults(self) -> Mapping[str, Any]:
        """Wait until an engine is ready, and return the model's own sampling parameters.

        Raises MinillmError if an engine fails, or dies again and again.
        """
        while not self.facts:
            self._receive()
        return next(iter(self.facts.values())).defaults

    def answers(self, rows: list[InputRow]) -> Iterator[Answer]:
        """Yield each row's answer once, in the order in which rows finish.

        If an engine dies, its unanswered rows go to other engines, or to this engine once it is restarted.

        While many rows are left, an engine gets many rows at a time. Near the end it gets single rows, so that all
        engines finish together (guided self-scheduling, Polychronopoulos and Kuck 1987). Raises MinillmError if an
        engine fails, or dies again and again.
        """
        self._waiting.extend(rows)
        while self._waiting or any(self._given):
            for number, facts in self.facts.items():
                num_free = facts.max_num_seqs - len(self._given[number])
                count = min(num_free, -(-len(self._waiting) // self.count))
                if some := [self._waiting.popleft() for _ in range(count)]:
                    self._given[number] |= {row.index: row for row in some}
                    self.send(number, some)
            yield from self._receive()

    def _receive(self) -> list[Answer]:
        """Wait for an event, and return the answers that are new."""
        number, event = self.receive()
        match event:
            case Facts():
                self.facts[number] = event
                if len({each.device for each in self.facts.values()}) > 1:
                    raise UsageError(f"engine {number} has found no GPU of its own: start fewer engines")
            case Died(how):
                say(f"engine {number} has died{how}; another takes its rows")
                self._deaths[number] += 1
                if self._deaths[number] > _MOST_DEATHS:
                    raise MinillmError(f"engine {number} has died {self._deaths[number]} times without an answer")
                self.facts.pop(number, None)
                self._waiting.extendleft(reversed(self._given[number].values()))
                self._given[number] = {}
                self.start(number)
            case MinillmError():
                kind = UsageError if isinstance(event, UsageError) else MinillmError
                raise kind(f"engine {number}: {event}")
            case answers:
                self._deaths[number] = 0
                return [answer for answer in answers if self._given[number].pop(answer["index"], None) is not None]
        return []
