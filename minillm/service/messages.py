"""What the chat app and the engine's process say to each other: dataclasses, sent as one JSON object a line.

Commands go to the engine, events come from it. Nothing here knows a widget, and nothing a tensor.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Command:
    """From the app to the engine."""


@dataclass(frozen=True)
class Event:
    """From the engine to the app."""


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load(Command):
    """Load a model. The first command of a process, and sent once: another model takes another process."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)  # of EngineConfig


@dataclass(frozen=True)
class Generate(Command):
    """Answer a conversation.

    Its blocks stay when the answer ends, so that the next turn of the same ``conversation`` computes only what is new.
    """

    request_id: str
    conversation: str
    messages: list[dict[str, str]]
    params: dict[str, Any] = field(default_factory=dict)  # of SamplingParams


@dataclass(frozen=True)
class Abort(Command):
    """End an answer; what has been said so far stays."""

    request_id: str


@dataclass(frozen=True)
class Forget(Command):
    """Free the blocks that a conversation holds."""

    conversation: str


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loading(Event):
    """How far the start has come; ``total`` is None where it is not known."""

    label: str
    done: int
    total: int | None
    unit: str


@dataclass(frozen=True)
class Notice(Event):
    """Something to know, in one line: which source failed and which one served. Not cleaned for a terminal."""

    text: str


@dataclass(frozen=True)
class Loaded(Event):
    """The model is ready."""

    model: str
    source: str  # what served it: a directory, the hub, a package
    num_parameters: int
    device: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    block_bytes: int
    has_chat_template: bool
    seconds: float


@dataclass(frozen=True)
class LoadFailed(Event):
    """The model cannot be used; the process ends."""

    error: str
    exit_code: int


@dataclass(frozen=True)
class Started(Event):
    """A prompt has been computed."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    time_to_first_token: float


@dataclass(frozen=True)
class TextDelta(Event):
    """More of one completion's text: as the model said it, not cleaned for a terminal."""

    request_id: str
    index: int
    text: str
    num_tokens: int


@dataclass(frozen=True)
class Finished(Event):
    """One completion has ended: ``finish_reason`` is "stop", "length" or "abort"."""

    request_id: str
    index: int
    finish_reason: str
    num_output_tokens: int
    tokens_per_second: float
    num_context_tokens: int  # prompt and completion


@dataclass(frozen=True)
class RequestFailed(Event):
    """A request was refused or broke; the engine goes on."""

    request_id: str
    error: str


@dataclass(frozen=True)
class ContextFull(Event):
    """A request was refused: the conversation has outgrown the context, the answer's first token included."""

    request_id: str
    num_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class TableView:
    """One sequence's block table."""

    seq_id: int
    owner: str  # the request that computes it, or the conversation that keeps it
    state: str  # "running" or "idle"
    num_tokens: int
    blocks: list[int]


@dataclass(frozen=True)
class CacheChanged(Event):
    """What changed in the pool since the last such event, and all block tables.

    ``changed`` lists (block, reference count, slots with a token); the first event lists every used block.
    """

    changed: list[tuple[int, int, int]]
    tables: list[TableView]
    free_blocks: int
    shared_blocks: int
    logical_blocks: int
    used_slots: int
    num_copies: int


_KINDS = {cls.__name__: cls for base in (Command, Event) for cls in base.__subclasses__()}


def encode(message: Command | Event) -> bytes:
    """One line of JSON."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Command | Event:
    """The message of a line that `encode` made.

    Raises:
        ValueError: it is not one.
    """
    values = json.loads(line)
    try:
        cls = _KINDS[values.pop("kind")]
    except (KeyError, AttributeError, TypeError):
        raise ValueError(f"not a message: {line[:80]!r}") from None
    if unknown := set(values) - {item.name for item in fields(cls)}:
        raise ValueError(f"{cls.__name__} has no field {sorted(unknown)[0]}")
    if cls is CacheChanged:
        values["tables"] = [TableView(**table) for table in values["tables"]]
        values["changed"] = [tuple(entry) for entry in values["changed"]]
    return cls(**values)
