"""The chat app and the engine's process speak in these messages: one JSON object a line.

Commands go to the engine, events come from it. Nothing here knows a widget, and nothing a tensor. The types bound each
number by itself; `EventReader` in `checks.py` compares an event with the events before it.
"""

import json
import re
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from minillm.outputs import FinishReason, StepReport
from minillm.progress import Progress

SYSTEM_PROMPT, FILES = "system prompt", "files"
"""Owners of pinned tables, which no request owns: the system prompt, and beginnings of conversations with files."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # a larger number has no exact JSON form everywhere
Size = Annotated[int, Meta(ge=1, le=1 << 53)]
Index = Annotated[int, Meta(ge=0, le=1 << 20)]
Amount = Annotated[float, Meta(ge=0, le=1e12)]
SeqId = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]  # -1 where an event has no sequence
TableState = Literal["running", "idle", "pinned", "swapped"]


class _Message(msgspec.Struct, tag=True, tag_field="message", forbid_unknown_fields=True):
    """The name of its class travels with it."""


class Command(_Message):
    """From the app to the engine."""


class Event(_Message):
    """From the engine to the app."""


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A part of an event. It travels as the list of its values: their names would be most of the message."""


class Load(Command):
    """Load a model. The first command of a process, and sent once: another model takes another process."""

    model: str
    options: dict[str, Any] = {}  # of EngineConfig


class Generate(Command):
    """Answer a conversation.

    The answer's blocks stay until `Drop`, `Forget` or pressure: the next question of the ``conversation`` computes only
    the tokens that it shares with no answer. So a branch is cheap.
    """

    request_id: str
    conversation: str
    messages: list[dict[str, str]]
    params: dict[str, Any] = {}  # of BeamSearchParams if it has "beam_width", else of SamplingParams
    continues: bool = False  # go on with the last message, which is the model's own
    thinks: bool | None = None  # first, where the template has that switch; None: as the template has it
    room: int = 1  # tokens that must be left for the answer, or the context counts as full
    num_pinned: int = 0  # of the first messages: their blocks stay under any load while questions begin with them


class Abort(Command):
    request_id: str  # of the answer that ends; its text so far stays


class Keep(Command):
    """Free the blocks of all candidates of an answer but number ``index``."""

    request_id: str
    index: int


class Drop(Command):
    request_id: str  # of the answer whose blocks are freed


class Forget(Command):
    conversation: str  # its blocks are freed


class Pin(Command):
    system: str  # prompt that is computed, and stays under any load in place of the one before; empty: none


class Pace(Command):
    steps_per_second: float  # at most, so that people can watch; 0: as many as the machine can


class Report(Command):
    every: float  # seconds between two reports of texts, beams and the pool, at least; an answer's ends do not wait


class Inspect(Command):
    block: int  # that `BlockFacts` shall describe


class Loading(Event):
    progress: Progress


class Notice(Event):
    text: str  # a line for the user: which source failed and which one served, say; not cleaned for a terminal


class Loaded(Event):
    """The model is ready."""

    model: str
    source: str  # it was served by: a directory, the hub, a package
    device: str
    dtype: str
    max_model_len: Size
    block_size: Size
    num_blocks: Size
    num_host_blocks: Count
    block_bytes: Count
    has_chat_template: bool
    seconds: Amount
    has_thinking_switch: bool = False  # the template can be told not to have the model think


class LoadFailed(Event):
    """The model cannot be used; the process ends."""

    error: str
    exit_code: Index


class Reading(Event):
    """A long prompt is being computed."""

    request_id: str
    num_computed_tokens: Count
    num_prompt_tokens: Size
    seconds_left: Amount | None  # at the rate so far; None before there is one


class Started(Event):
    """A prompt has been computed."""

    request_id: str
    num_prompt_tokens: Count
    num_cached_tokens: Count
    time_to_first_token: Amount
    in_reasoning: bool = False  # the template has opened the model's <think> section


class TokenChoice(_Record):
    """A token that was drawn, its log-probability, and the most probable ones, best first. Not cleaned."""

    text: str
    logprob: float
    top_texts: list[str]
    top_logprobs: list[float]


class TextDelta(Event):
    """More of one completion's text, as the model wrote it: not cleaned for a terminal."""

    request_id: str
    index: Index
    text: str
    num_tokens: Count
    tokens: list[TokenChoice] = []  # where the request asked for log-probabilities


class BeamView(_Record):
    """A beam as it stands. ``score`` is its log-probability over its length to the power of the length penalty."""

    text: str
    score: float
    logprob: float
    num_tokens: Count
    finished: bool


class BeamsChanged(Event):
    request_id: str
    beams: list[BeamView]  # the best first; sent a few times a second while the search goes on, and when it ends


class Finished(Event):
    """One completion has ended."""

    request_id: str
    index: Index
    finish_reason: FinishReason
    num_output_tokens: Count
    tokens_per_second: Amount
    num_context_tokens: Count  # prompt and completion
    num_guessed_tokens: Count = 0  # of the completion, those that speculation had guessed


class RequestFailed(Event):
    """A request was refused or broke; the engine goes on."""

    request_id: str
    error: str


class ContextFull(Event):
    """A request was refused: the conversation has outgrown the context, the answer's first token included."""

    request_id: str
    num_tokens: Count
    max_model_len: Count


class TableView(_Record):
    """One sequence's block table. In a `CacheChanged` its first ``keep`` blocks stay, and ``blocks`` follow them."""

    seq_id: SeqId
    owner: str  # the request that computes it or keeps it; empty where it is the engine's own
    index: Index  # of the completion within its request
    state: TableState  # "swapped": the blocks are those of the host
    num_tokens: Count
    blocks: list[Count]
    keep: Count = 0


class CacheCounts(_Record):
    """Counts of the pool's events since the start, and of the blocks on the host now."""

    num_copies: Count = 0
    num_evictions: Count = 0
    num_hit_tokens: Count = 0
    num_looked_up_tokens: Count = 0
    num_preemptions: Count = 0
    num_swapped_out: Count = 0  # blocks
    num_swapped_in: Count = 0
    host_blocks_used: Count = 0


class LogEntry(_Record):
    """One event of the cache, see `minillm.cache.CacheEvent`, with its time and its meaning in numbers."""

    time: Amount  # seconds since the model was loaded
    kind: str
    seq_id: SeqId
    owner: str
    blocks: list[Count]
    parent_id: SeqId | None = None
    detail: Count = 0  # of a copy, how many others still hold the source; of a hit, the tokens that it saved


class CacheChanged(Event):
    """The changes in the pool since the last such event; the first one names all that is not free.

    A block's state follows from the tables that hold it. One that no table holds is free or cached.
    """

    tables: list[TableView] = []  # new ones, and those that are other than they were
    gone: list[SeqId] = []  # sequences without a table now
    cached: list[Count] = []  # blocks that are cached now
    uncached: list[Count] = []  # and those that were
    counts: CacheCounts = msgspec.field(default_factory=CacheCounts)
    log: list[LogEntry] = []
    num_unlogged: Count = 0  # events that were too many to send
    words: dict[Count, str] = {}  # the first words of blocks that are held, where they are new; not cleaned


class MemoryUse(Event):
    """Who has the memory of the model's device, in bytes; ``cache`` is the pool, as far as it is there."""

    total: Count
    free: Count
    weights: Count
    cache: Count
    rest: Count  # of the engine's process: room for the steps


class Stepped(Event):
    steps: list[StepReport]  # since the last such event


class BlockFacts(Event):
    """The facts of a block that the engine alone knows."""

    block: Count
    tokens: list[str]  # not cleaned
    node: Count | None  # its number in the prefix cache, if it can be found there
    before: str  # the number of the node before it, or the salt of a first block
    age: Amount | None  # seconds since it was taken


_LONE_SURROGATES = re.compile("[\ud800-\udfff]")

# A line that `encode` made -> its message. ValueError, in one line, where it is none of its kind.
decode_command = msgspec.json.Decoder[Command](reduce(or_, Command.__subclasses__())).decode
decode_event = msgspec.json.Decoder[Event](reduce(or_, Event.__subclasses__())).decode


def encode(message: Command | Event) -> bytes:
    """One line of JSON. Lone surrogates, which UTF-8 does not have, become U+FFFD."""
    try:
        return msgspec.json.encode(message) + b"\n"
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(message), ensure_ascii=False)
        return _LONE_SURROGATES.sub("\ufffd", text).encode() + b"\n"
