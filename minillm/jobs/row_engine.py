"""An engine in this process that answers rows (prompts of a file)."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from minillm.jobs.engines import Facts
from minillm.jobs.rows import Answer, InputRow, Style, as_json
from minillm.llm import LLM
from minillm.llm_methods import refusal
from minillm.params import Params
from minillm.text.prompts import Prompt

_Requests = list[tuple[InputRow, Callable[[], tuple[Prompt, Params]]]]


class RowEngine:
    """Answers rows with a model's engine."""

    def __init__(self, llm: LLM, style: Style) -> None:
        self.llm, self._style = llm, style
        self._rows: queue.SimpleQueue[InputRow] = queue.SimpleQueue()
        self._num_running = 0

    def facts(self) -> Facts:
        """Return the facts about the engine."""
        engine = self.llm.engine
        return Facts(engine.defaults, self.llm.config.max_num_seqs, engine.runner.model.device.type)

    def defaults(self) -> Mapping[str, Any]:
        """Return the model's own sampling parameters."""
        return self.llm.engine.defaults

    def answers(self, rows: list[InputRow]) -> Iterator[Answer]:
        """Yield each row's answer when it is finished. Closing the iterator early aborts the running rows.

        If a row fails, its answer contains the error. An exception means that the engine itself failed.
        """
        left = iter(rows)
        return self._work(lambda max_rows: self._requests(list(islice(left, max_rows))))

    def submit(self, row: InputRow) -> None:
        """Queue a row for `work`. Any thread may call this."""
        self._rows.put(row)

    def work(self) -> Iterator[Answer]:
        """Yield the answers of submitted rows as `answers` does, without end. A new row joins the running batch."""
        return self._work(self._take)

    def _work(self, take: Callable[[int], _Requests | None]) -> Iterator[Answer]:
        for row, output in self.llm.work_off(take, lambda row, error: refusal(row.prompt or "", error)):
            self._num_running -= 1
            yield as_json(row, output, self.llm.engine.tokenizer)

    def _requests(self, rows: list[InputRow]) -> _Requests:
        self._num_running += len(rows)
        return [(row, partial(self._style.request, row, self.llm)) for row in rows]

    def _take(self, max_rows: int) -> _Requests | None:
        rows: list[InputRow] = []
        while len(rows) < max_rows:
            try:
                rows.append(self._rows.get(block=not rows and not self._num_running))
            except queue.Empty:
                break
        return self._requests(rows) or None
