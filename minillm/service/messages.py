"""What the chat app and the engine's process say to each other: dataclasses, sent as one JSON object a line.

Commands go to the engine, events come from it. Nothing here knows a widget, and nothing a tensor. They are not frozen:
that would take twice as long to make so many classes, and the chat's first screen waits for them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, field, fields, is_dataclass
from typing import Any


@dataclass
class Command:
    """From the app to the engine."""


@dataclass
class Event:
    """From the engine to the app."""


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass
class Load(Command):
    """Load a model. The first command of a process, and sent once: another model takes another process."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)  # of EngineConfig


@dataclass
class Generate(Command):
    """Answer a conversation.

    The blocks of every answer stay when it ends, until `Drop`, `Forget` or pressure: whatever the next question of the
    same ``conversation`` has in common with any of them is not computed again. So a branch costs what it adds.
    """

    request_id: str
    conversation: str
    messages: list[dict[str, str]]
    params: dict[str, Any] = field(default_factory=dict)  # of BeamSearchParams if it has "beam_width", else Sampling
    continues: bool = False  # go on with the last message, which is the model's own
    room: int = 1  # tokens that must be left for the answer, or the context counts as full


@dataclass
class Abort(Command):
    """End an answer; what has been said so far stays."""

    request_id: str


@dataclass
class Keep(Command):
    """Of an answer's candidates keep the blocks of number ``index``, and free those of the others."""

    request_id: str
    index: int


@dataclass
class Drop(Command):
    """Free the blocks that one answer keeps."""

    request_id: str


@dataclass
class Forget(Command):
    """Free the blocks that a conversation holds."""

    conversation: str


@dataclass
class Pin(Command):
    """Compute a system prompt and keep its blocks under any load, instead of the one before. Empty: none."""

    system: str


@dataclass
class Pace(Command):
    """Take at most so many steps a second, so that people can watch; 0: as many as the machine can."""

    steps_per_second: float


@dataclass
class Report(Command):
    """Tell texts, beams and pictures of the pool no more often than every so many seconds, what came between at once.

    Before this each token is told as it comes. The first tokens and the end of an answer never wait.
    """

    every: float


@dataclass
class Inspect(Command):
    """Tell what is known of a block: `BlockFacts` answers."""

    block: int


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass
class Loading(Event):
    """How far the start has come; ``total`` is None where it is not known."""

    label: str
    done: int
    total: int | None
    unit: str


@dataclass
class Notice(Event):
    """Something to know, in one line: which source failed and which one served. Not cleaned for a terminal."""

    text: str


@dataclass
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
    num_host_blocks: int
    block_bytes: int
    has_chat_template: bool
    seconds: float


@dataclass
class LoadFailed(Event):
    """The model cannot be used; the process ends."""

    error: str
    exit_code: int


@dataclass
class Started(Event):
    """A prompt has been computed."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    time_to_first_token: float
    in_reasoning: bool = False  # the template has opened the model's <think> section


@dataclass
class TokenChoice:
    """A token that was drawn, its log-probability, and the most probable ones, best first. Not cleaned."""

    text: str
    logprob: float
    top_texts: list[str]
    top_logprobs: list[float]


@dataclass
class TextDelta(Event):
    """More of one completion's text: as the model said it, not cleaned for a terminal."""

    request_id: str
    index: int
    text: str
    num_tokens: int
    tokens: list[TokenChoice] = field(default_factory=list)  # where the request asked for log-probabilities


@dataclass
class BeamView:
    """A beam as it stands. ``score`` is its log-probability over its length to the power of the length penalty."""

    text: str
    score: float
    logprob: float
    num_tokens: int
    finished: bool


@dataclass
class BeamsChanged(Event):
    """The beams of a search, the best first: sent a few times a second while it goes on, and when it ends."""

    request_id: str
    beams: list[BeamView]


@dataclass
class Finished(Event):
    """One completion has ended: ``finish_reason`` is "stop", "length" or "abort"."""

    request_id: str
    index: int
    finish_reason: str
    num_output_tokens: int
    tokens_per_second: float
    num_context_tokens: int  # prompt and completion


@dataclass
class RequestFailed(Event):
    """A request was refused or broke; the engine goes on."""

    request_id: str
    error: str


@dataclass
class ContextFull(Event):
    """A request was refused: the conversation has outgrown the context, the answer's first token included."""

    request_id: str
    num_tokens: int
    max_model_len: int


@dataclass
class TableView:
    """One sequence's block table."""

    seq_id: int
    owner: str  # the request that computes it or keeps it; empty where it is the engine's own
    index: int  # of the completion within its request
    state: str  # "running", "idle", "pinned" or "swapped": then the blocks are those of the host
    num_tokens: int
    blocks: list[int]


@dataclass
class TableChange:
    """A table that is new or other than it was: its first ``keep`` blocks stay, ``blocks`` follow them."""

    seq_id: int
    owner: str
    index: int
    state: str
    num_tokens: int
    keep: int
    blocks: list[int]


@dataclass
class BlockChange:
    """A block that looks other than it did."""

    block: int
    ref_count: int
    filled: int  # slots with a token
    kind: str  # "free", "owned", "shared", "cached" (held by nobody, but findable) or "pinned"


@dataclass
class PoolFigures:
    """The pool at one moment, and what has happened to it since the start. Blocks unless the name says otherwise."""

    free_blocks: int = 0  # the cached ones are not among them
    cached_blocks: int = 0
    shared_blocks: int = 0
    pinned_blocks: int = 0
    logical_blocks: int = 0  # entries of all tables: what the same sequences would take without sharing
    used_slots: int = 0
    host_blocks_used: int = 0
    num_copies: int = 0
    num_evictions: int = 0
    num_hit_tokens: int = 0
    num_looked_up_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0


@dataclass
class LogEntry:
    """One event of the cache, see `minillm.cache.CacheEvent`, with its time and what it means in numbers.

    ``detail``: of a copy, how many others still hold the source; of a hit, the tokens that it saved.
    """

    time: float  # seconds since the model was loaded
    kind: str
    seq_id: int
    owner: str
    blocks: list[int]
    parent_id: int | None = None
    detail: int = 0


@dataclass
class CacheChanged(Event):
    """What changed in the pool since the last such event; the first one tells all that is not free."""

    blocks: list[BlockChange]
    tables: list[TableChange]
    gone: list[int]  # sequences without a table now
    figures: PoolFigures
    log: list[LogEntry] = field(default_factory=list)
    num_unlogged: int = 0  # events that were too many to tell


@dataclass
class StepView:
    """One step of the engine: see `minillm.engine.engine.StepReport`."""

    number: int
    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_preempted: int
    num_swapped_out: int
    num_swapped_in: int
    seconds: float
    device_seconds: float
    ended: float


@dataclass
class Stepped(Event):
    """The steps since the last such event."""

    steps: list[StepView]


@dataclass
class Holder:
    """A sequence that holds a block, as number ``logical_block`` of its table."""

    owner: str
    index: int
    seq_id: int
    logical_block: int


@dataclass
class BlockFacts(Event):
    """All that is known of a block."""

    block: int
    kind: str
    ref_count: int
    filled: int
    holders: list[Holder]
    tokens: list[str]  # not cleaned
    node: int | None  # its number in the prefix cache, if it can be found there
    before: str  # what it can be found after: the number of another node, or the salt of a first block
    age: float | None  # seconds since it was taken


_KINDS = {cls.__name__: cls for base in (Command, Event) for cls in base.__subclasses__()}


_ITEMS: dict[tuple[type, str], type] = {
    (CacheChanged, "blocks"): BlockChange,
    (CacheChanged, "tables"): TableChange,
    (CacheChanged, "log"): LogEntry,
    (TextDelta, "tokens"): TokenChoice,
    (BeamsChanged, "beams"): BeamView,
    (Stepped, "steps"): StepView,
    (BlockFacts, "holders"): Holder,
}  # lists of records travel as lists of their values: a name for each of 20,000 blocks would be most of the message


def encode(message: Command | Event) -> bytes:
    """One line of JSON."""
    values: dict[str, Any] = {"message": type(message).__name__}
    for item in fields(message):
        value = getattr(message, item.name)
        if (type(message), item.name) in _ITEMS:
            value = [astuple(each) for each in value]
        values[item.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Command | Event:
    """The message of a line that `encode` made.

    Raises:
        ValueError: it is not one.
    """
    values = json.loads(line)
    try:
        cls = _KINDS[values.pop("message")]
    except (KeyError, AttributeError, TypeError):
        raise ValueError(f"not a message: {line[:80]!r}") from None
    if unknown := set(values) - {item.name for item in fields(cls)}:
        raise ValueError(f"{cls.__name__} has no field {sorted(unknown)[0]}")
    try:
        for name, value in values.items():
            record = _ITEMS.get((cls, name))
            if record is not None:
                values[name] = [record(*each) for each in value]
        if cls is CacheChanged:
            values["figures"] = PoolFigures(**values["figures"])
        return cls(**values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{cls.__name__}: {error}") from None
