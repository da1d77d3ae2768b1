"""Decode and check events on the app's side. The app can then rely on them, even if the server is untrusted.

The types in `messages.py` limit each number on its own. This module also compares events with earlier events, makes
names and errors safe for a terminal, and limits the sizes of texts and lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass

from minillm.service import messages
from minillm.service.messages import CacheChanged, Command, Event, LogEntry, TableView, decode_event
from minillm.text.safe import clean, clean_line

_MOST_BLOCKS = 1 << 21  # the largest pool the app can draw
_MOST_TABLES, _MOST_ENTRIES = 1 << 16, 1 << 22  # tables at one time, and their blocks in total
_MOST_LOGGED, _MOST_STEPS, _MOST_BEAMS = 10_000, 1_000, 1_000  # per event
_LONGEST_NAME, _LONGEST_ERROR, _LONGEST_WORDS = 200, 2_000, 200  # characters
_LONGEST_ANSWER = 1 << 25  # characters
_LARGEST = float(1 << 53)
_BEFORE_LOADED = messages.Loading | messages.Notice | messages.LoadFailed


@dataclass
class _Answer:
    """An answer that the app has requested, with its number of completions and the characters received so far."""

    num_texts: int
    num_chars: int = 0


@dataclass(frozen=True)
class _Table:
    num_blocks: int
    swapped: bool


class EventReader:
    """Decodes and checks one engine's events.

    The app must pass each command to `note` as well, so that the reader knows which answers to expect.
    """

    def __init__(self) -> None:
        self._loaded: messages.Loaded | None = None
        self._answers: dict[str, _Answer] = {}  # by request
        self._tables: dict[int, _Table] = {}  # by seq_id
        self._num_entries = 0  # blocks in all tables

    def note(self, command: Command) -> None:
        """Record a command that is sent to the engine. Later events about the same request are checked against it."""
        if isinstance(command, messages.Generate):
            params = command.params
            count = params.get("beam_width") or params.get("n", 1) + len(params.get("reasoning_depths", ()))
            self._answers[command.request_id] = _Answer(int(count))

    def read(self, line: bytes) -> Event:
        """Decode one line of the engine's output, check it, and return the event.

        Raises:
            ValueError: the line is not an event, or contradicts earlier events.
        """
        event = decode_event(line)
        if self._loaded is None and not isinstance(event, messages.Loaded | _BEFORE_LOADED):
            raise ValueError(f"{type(event).__name__} before a model was loaded")
        match event:
            case messages.Loading(progress):
                _check_numbers((progress.done, progress.total or 0))
            case messages.Preparing(done, total):
                if done > total:
                    raise ValueError(f"{done} of {total} shapes are prepared")
            case messages.Loaded():
                self._load(event)
            case messages.LoadFailed():
                event.error = _safe_text(event.error)
            case messages.RequestFailed():
                event.error = _safe_text(event.error)
            case messages.Notice():
                event.text = _safe_text(event.text)
            case messages.TextDelta():
                self._grow(event)
            case messages.Finished():
                self._check_index(event.request_id, event.index)
            case messages.BeamsChanged(_, beams):
                _check_length("beams", beams, _MOST_BEAMS)
            case CacheChanged():
                self._change(event)
            case messages.Stepped(steps):
                _check_length("steps", steps, _MOST_STEPS)
                for step in steps:
                    _check_numbers(astuple(step))
            case messages.BlockFacts():
                _check_length("tokens", event.tokens, self._pool.block_size)
                event.before = _safe_name(event.before)
        return event

    @property
    def _pool(self) -> messages.Loaded:
        assert self._loaded is not None
        return self._loaded

    def _load(self, event: messages.Loaded) -> None:
        if self._loaded is not None:
            raise ValueError("a model was loaded twice")
        most = max(event.num_blocks, event.num_host_blocks)
        if most > _MOST_BLOCKS:
            raise ValueError(f"a pool of {most:,} blocks: the chat shows at most {_MOST_BLOCKS:,}")
        for name in ("model", "source", "device", "dtype"):
            setattr(event, name, _safe_name(getattr(event, name)))
        self._loaded = event

    def _check_index(self, request_id: str, index: int) -> _Answer | None:
        answer = self._answers.get(request_id)
        if answer is not None and index >= answer.num_texts:
            raise ValueError(f"text {index} of an answer that has {answer.num_texts}")
        return answer

    def _grow(self, event: messages.TextDelta) -> None:
        answer = self._check_index(event.request_id, event.index)
        if answer is not None:
            answer.num_chars += len(event.text)
            if answer.num_chars > _LONGEST_ANSWER:
                raise ValueError(f"an answer of more than {_LONGEST_ANSWER:,} characters")

    def _change(self, event: CacheChanged) -> None:
        on_device = self._pool.num_blocks
        for seq_id in event.gone:
            self._put(seq_id, None)
        for table in event.tables:
            self._check_table(table)
        _check_length("tables", self._tables, _MOST_TABLES)
        if self._num_entries > _MOST_ENTRIES:
            raise ValueError(f"block tables of {self._num_entries:,} blocks")
        for blocks in (event.cached, event.uncached, event.loaded, event.unloaded, event.words):
            _check_blocks(blocks, on_device)
        _check_length("log", event.log, _MOST_LOGGED)
        for entry in event.log:
            _check_entry(entry, max(on_device, self._pool.num_host_blocks))
        if any(len(words) > _LONGEST_WORDS for words in event.words.values()):
            event.words = {block: words[:_LONGEST_WORDS] for block, words in event.words.items()}

    def _check_table(self, table: TableView) -> None:
        before, swapped = self._tables.get(table.seq_id), table.state == "swapped"
        most = self._pool.num_host_blocks if swapped else self._pool.num_blocks
        if table.keep and (before is None or table.keep > before.num_blocks or swapped != before.swapped):
            raise ValueError(f"a block table keeps {table.keep} blocks that it does not have")
        _check_blocks(table.blocks, most)
        table.owner = _safe_name(table.owner)
        self._put(table.seq_id, _Table(table.keep + len(table.blocks), swapped))

    def _put(self, seq_id: int, table: _Table | None) -> None:
        if (before := self._tables.pop(seq_id, None)) is not None:
            self._num_entries -= before.num_blocks
        if table is not None:
            self._num_entries += table.num_blocks
            self._tables[seq_id] = table


def _check_entry(entry: LogEntry, num_blocks: int) -> None:
    if entry.kind == "copy" and len(entry.blocks) != 2:
        raise ValueError(f"a copy of {len(entry.blocks)} blocks")
    _check_blocks(entry.blocks, num_blocks)
    entry.kind, entry.owner = _safe_name(entry.kind), _safe_name(entry.owner)


def _check_blocks(blocks: Collection[int], num_blocks: int) -> None:
    if blocks and max(blocks) >= num_blocks:
        raise ValueError(f"block {max(blocks)} of a pool of {num_blocks}")


def _check_length(what: str, items: Collection[object], most: int) -> None:
    if len(items) > most:
        raise ValueError(f"{len(items):,} {what}, more than {most:,}")


def _check_numbers(numbers: Iterable[float]) -> None:
    """Raise ValueError for a negative or too large number.

    The numbers are fields of types from other modules. Unlike the types in `messages.py`, these
    types do not limit their numbers.
    """
    for number in numbers:
        if not 0 <= number <= _LARGEST:
            raise ValueError("a number out of range")


def _safe_name(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME and text.isprintable() else clean_line(text, _LONGEST_NAME)


def _safe_text(text: str) -> str:
    return clean(text[:_LONGEST_ERROR])
