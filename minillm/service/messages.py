"""Messages between the engine process and its front end, which is a chat app or the HTTP process.

An app sends commands and gets events, one JSON object per line, on this machine and over HTTP. The HTTP process also
uses the messages of `call_messages.py`. This module imports neither the UI nor torch. The types limit each number on
its own. `EventReader` in `checks.py` also compares an event with earlier events.
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
"""Names shown as owners of pinned tables: the system prompt, and beginnings of conversations with files."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # larger integers are not exact in every JSON parser
Size = Annotated[int, Meta(ge=1, le=1 << 53)]
Index = Annotated[int, Meta(ge=0, le=1 << 20)]
Amount = Annotated[float, Meta(ge=0, le=1e12)]
SeqId = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]  # -1 if an event concerns no sequence
TableState = Literal["running", "idle", "pinned", "swapped"]


class Message(msgspec.Struct, tag=True, tag_field="message", forbid_unknown_fields=True):
    """A message. Its class name is sent in the field ``message``."""


class Command(Message):
    """A message from the app to the engine."""


class Event(Message):
    """A message from the engine to the app."""


class Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A part of a message. It is sent as a list of the fields' values.

    The names of the fields are not sent, because they would take most of the bytes.
    """


class Load(Command):
    """Load a model. This must be the first message. It is sent once, so another model needs another process."""

    model: str
    options: dict[str, Any] = {}  # options of EngineConfig
    wait_warm: bool = False  # prepare kernels and CUDA graphs for steps of all shapes before `Loaded` is sent


class Generate(Command):
    """Answer a conversation.

    The answer's blocks stay in the pool until `Drop`, `Forget` or eviction. The conversation's next question forks from
    the answer that shares the longest beginning with the new prompt. Only the tokens after this beginning are computed,
    which makes branches cheap.
    """

    request_id: str
    conversation: str
    messages: list[dict[str, str]]
    params: dict[str, Any] = {}  # fields of BeamSearchParams if it has "beam_width", else of SamplingParams
    continues: bool = False  # the last message is the beginning of an answer, which the model continues
    thinks: bool | None = None  # think before the answer, if the template has this switch; None: the template's default
    min_context_left: int = 1  # if fewer tokens of context are left for the answer, the engine sends `ContextFull`
    num_pinned: int = 0  # number of first messages to pin, until a prompt of the conversation begins otherwise
    owner: str = ""  # name of the conversation's blocks on disk, for `Erase`; empty: keep none on disk


class Abort(Command):
    request_id: str  # the request to end early; the text generated so far stays valid


class Keep(Command):
    """Keep the blocks of candidate ``index`` (a sample or beam). Free the blocks of the answer's other candidates."""

    request_id: str
    index: int


class Drop(Command):
    request_id: str  # the answer's request; its blocks are freed, and it is aborted if it is running


class Forget(Command):
    conversation: str  # do the same as `Drop` for all answers of this conversation


class ReadAhead(Command):
    """Read the blocks of an opened conversation from disk, before its next question."""

    conversation: str
    messages: list[dict[str, str]]
    thinks: bool | None = None  # see `Generate`
    owner: str = ""  # see `Generate`; if it is empty, nothing is read


class Erase(Command):
    owner: str  # remove this owner's blocks on disk, except blocks that have other owners as well


class Pin(Command):
    system: str  # system prompt to pin instead of the previous prompt; empty: only unpin the previous prompt


class Pace(Command):
    steps_per_second: float  # maximum rate of engine steps, so that people can watch; 0: no limit


class Report(Command):
    every: float  # minimum seconds between reports of text, beams and the pool; the end of an answer is sent at once


class Inspect(Command):
    block: int  # number of the block to describe in a `BlockFacts`


class Loading(Event):
    progress: Progress


class Notice(Event):
    text: str  # a line for the user, such as which download source failed; not cleaned for a terminal


class Preparing(Event):
    """In idle moments, the engine prepares kernels and CUDA graphs for steps of all shapes.

    ``done`` of ``total`` shapes are prepared.
    """

    done: Count
    total: Count


class Loaded(Event, omit_defaults=True):
    """The model is ready. The fields from ``max_num_seqs`` on are for the HTTP process."""

    model: str
    source: str  # where the model was loaded from: a directory, the hub, a package
    device: str
    dtype: str
    max_model_len: Size
    block_size: Size
    num_blocks: Size
    num_host_blocks: Count
    block_bytes: Count
    has_chat_template: bool
    seconds: Amount
    has_thinking_switch: bool = False  # the chat template can turn thinking off
    has_reasoning_tags: bool = False  # the model's reasoning can be limited
    max_num_seqs: Count = 0
    vocab_size: Count = 0
    defaults: dict[str, Any] = {}  # the model's own sampling defaults
    chat_template: str = ""


class LoadFailed(Event):
    """The model cannot be loaded. The process ends."""

    error: str
    exit_code: Index


class Reading(Event):
    """Progress of computing a long prompt."""

    request_id: str
    num_computed_tokens: Count
    num_prompt_tokens: Size
    seconds_left: Amount | None  # estimated from the rate so far; None before a rate is known


class Started(Event):
    """The prompt has been computed."""

    request_id: str
    num_prompt_tokens: Count
    num_cached_tokens: Count
    time_to_first_token: Amount
    in_reasoning: bool = False  # the template has opened the model's <think> section
    num_disk_tokens: Count = 0  # cached tokens that were read from disk
    disk_seconds: Amount = 0.0


class TokenChoice(Record):
    """A sampled token, its log-probability, and the most probable tokens at its position, best first.

    The texts are not cleaned for a terminal.
    """

    text: str
    logprob: float
    top_texts: list[str]
    top_logprobs: list[float]


class TextDelta(Event):
    """More text of one completion. It is raw model output, not cleaned for a terminal."""

    request_id: str
    index: Index
    text: str
    num_tokens: Count
    tokens: list[TokenChoice] = []  # if the request asked for log-probabilities
    num_shared: Count = 0  # how many of ``num_tokens`` were computed for another completion, before this one forked


class BeamView(Record):
    """The current state of a beam. ``score`` is ``logprob`` divided by (the beam's length) ** (length penalty)."""

    text: str
    score: float
    logprob: float
    num_tokens: Count
    finished: bool


class BeamsChanged(Event):
    request_id: str
    beams: list[BeamView]  # best first; sent a few times a second during the search, and when it ends


class Finished(Event):
    """One completion has ended."""

    request_id: str
    index: Index
    finish_reason: FinishReason
    num_output_tokens: Count
    tokens_per_second: Amount
    num_context_tokens: Count  # tokens of prompt and completion
    num_guessed_tokens: Count = 0  # accepted draft tokens of the completion


class RequestFailed(Event, omit_defaults=True):
    """A request was rejected or failed. The engine continues.

    ``kind`` is "usage", "context", "capacity", "internal" or "gone".
    """

    request_id: str
    error: str
    kind: str = "usage"


class ContextFull(Event):
    """A request was rejected: the conversation and the answer's first token do not fit the context."""

    request_id: str
    num_tokens: Count
    max_model_len: Count


class TableView(Record):
    """One sequence's block table.

    In a `CacheChanged`, ``blocks`` lacks the first ``keep`` blocks of the table, which have not changed since the last
    report.
    """

    seq_id: SeqId
    owner: str  # the request that runs or keeps the sequence; empty for the engine's own sequences
    index: Index  # index of the completion within its request
    state: TableState  # "swapped": ``blocks`` are blocks in host memory
    num_tokens: Count
    blocks: list[Count]
    keep: Count = 0


class CacheCounts(Record):
    """Counts of events in the pool since the start, and the number of blocks that are in host memory now."""

    num_copies: Count = 0
    num_evictions: Count = 0
    num_hit_tokens: Count = 0
    num_looked_up_tokens: Count = 0
    num_preemptions: Count = 0
    num_swapped_out: Count = 0  # blocks copied to host memory
    num_swapped_in: Count = 0  # blocks copied back from host memory
    host_blocks_used: Count = 0
    disk_limit: Count = 0  # this field and the next fields: see `minillm.cache.CacheStats`
    disk_bytes: Count = 0
    num_disk_saved: Count = 0
    num_disk_read: Count = 0
    disk_read_seconds: Amount = 0.0


class LogEntry(Record):
    """One event of the cache, see `minillm.cache.CacheEvent`."""

    time: Amount  # seconds since the model was loaded
    kind: str
    seq_id: SeqId
    owner: str
    blocks: list[Count]
    parent_id: SeqId | None = None
    detail: Count = 0  # for a copy, the number of references that the source still has; for a hit, the tokens found


class CacheChanged(Event):
    """The changes in the block pool since the last `CacheChanged`.

    The first `CacheChanged` lists all blocks that are not free. A block's state follows from the tables that contain
    the block. A block in no table is free or cached.
    """

    tables: list[TableView] = []  # new and changed tables
    gone: list[SeqId] = []  # sequences that no longer have a table
    cached: list[Count] = []  # blocks that became cached
    uncached: list[Count] = []  # blocks that are no longer cached
    counts: CacheCounts = msgspec.field(default_factory=CacheCounts)
    log: list[LogEntry] = []
    num_unlogged: Count = 0  # number of events that are not in ``log`` because there were too many
    words: dict[Count, str] = {}  # new labels by block: text at the beginning of the block, not cleaned for a terminal
    loaded: list[Count] = []  # blocks with content that was just read from disk
    unloaded: list[Count] = []  # earlier ``loaded`` blocks that have other content now


class MemoryUse(Event):
    """Memory use of the model's device, in bytes. ``cache`` is the allocated part of the block pool."""

    total: Count
    free: Count
    weights: Count
    cache: Count
    rest: Count  # other memory of the engine process, such as activations and workspaces


class Stepped(Event):
    steps: list[StepReport]  # the steps since the last `Stepped`


class BlockFacts(Event):
    """The answer to `Inspect`: details of a block that only the engine knows."""

    block: Count
    tokens: list[str]  # texts of the block's tokens, not cleaned for a terminal
    node: Count | None  # number of the block's node in the prefix cache; None if the block is not cached
    before: str  # number of the node before this node; for the first block of a prompt, the salt
    age: Amount | None  # seconds since the block was allocated


_LONE_SURROGATES = re.compile("[\ud800-\udfff]")

# Decode a line that `encode` returned. Raises ValueError, with a one-line message, for anything else.
decode_command = msgspec.json.Decoder[Command](reduce(or_, Command.__subclasses__())).decode
decode_event = msgspec.json.Decoder[Event](reduce(or_, Event.__subclasses__())).decode


def encode(message: Message) -> bytes:
    """Return a message as one line of JSON. Lone surrogates, which UTF-8 cannot encode, become U+FFFD."""
    try:
        return msgspec.json.encode(message) + b"\n"
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(message), ensure_ascii=False)
        return _LONE_SURROGATES.sub("\ufffd", text).encode() + b"\n"
