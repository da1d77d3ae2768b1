"""The HTTP side and the engine's process speak in these messages: MessagePack, each behind its length in four bytes.

Calls go to the engine's process, events come from it.
"""

from functools import reduce
from operator import or_
from typing import Any, BinaryIO

import msgspec

from minillm.errors import CapacityError, ContextLengthError, MinillmError, UsageError
from minillm.service import messages as chat


class _Message(msgspec.Struct, tag=True, tag_field="message", forbid_unknown_fields=True):
    """The name of its class travels with it."""


class Call(_Message):
    """From the HTTP side to the engine's process."""


class Event(_Message):
    """From the engine's process to the HTTP side."""


class Record(msgspec.Struct, array_like=True):
    """A part of a message. It travels as the list of its values."""


class Conversation(msgspec.Struct):
    """Messages that the model's template makes a prompt of."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}  # variables that the template knows, ``enable_thinking``, say


class ForkPoint(Record):
    """A place in an earlier answer: its request, the completion, and how many of that one's tokens are kept."""

    request_id: str
    index: int = 0
    num_tokens: int | None = None  # None: all


class Load(Call):
    """Load a model. The first call, and sent once."""

    model: str
    options: dict[str, Any] = {}  # of EngineConfig


class Complete(Call):
    """Answer a request.

    The prompt is text, token ids or a conversation; behind a fork it is that which follows the fork, perhaps nothing.
    """

    request_id: str
    tenant: str  # only requests of the same one fork each other's answers
    prompt: str | list[int] | Conversation | None
    params: dict[str, Any]  # of BeamSearchParams if it has "beam_width", else of SamplingParams
    streamed: bool = False  # send `Began` at once, and texts as they come
    echo: bool = False  # tell the prompt's text in `Began`, before the first text
    wants_ids: bool = False  # `Began` and texts tell their token ids
    keep: bool = False  # the blocks stay when it has ended, for forks
    fork: ForkPoint | None = None
    salt: str | None = None
    schemas: dict[str, Any] = {}  # of arguments, by the name of the tool: the grammar lacks their rules
    thinks: bool = False  # the grammar has room for thoughts


class Abort(Call):
    request_id: str


class Tokenize(Call):
    call_id: str
    tenant: str
    prompt: str | Conversation
    add_special_tokens: bool = True
    parse_special: bool = False


class Detokenize(Call):
    call_id: str
    tenant: str
    token_ids: list[int]


class PinPrefix(Call):
    """Compute a beginning and keep its blocks under any load."""

    call_id: str
    tenant: str
    prompt: str | list[int] | Conversation
    salt: str | None = None


class UnpinPrefix(Call):
    call_id: str
    prefix_id: str


class Ping(Call):
    """Ask for the seconds that the step under way has taken so far. It is answered outside of steps."""

    call_id: str


class ReadCache(Call):
    call_id: str


class Watch(Call):
    """Send pictures of the pool as it changes."""

    watcher: str
    reader: str | None = None  # the tenant whose words may be shown; None: all


class Unwatch(Call):
    watcher: str


class OpenSession(Call):
    """A chat app begins to use the engine; see `minillm.service.messages` for its commands and events."""

    session: str
    tenant: str
    reader: str | None = None  # the tenant whose words may be shown; None: all
    salt: str | None = None  # of all its prompts


class SessionCommand(Call):
    session: str
    command: bytes  # one line


class CloseSession(Call):
    session: str


class Token(Record):
    """A token, its log-probability, and the most probable ones in its place, as (text, bytes, log-probability).

    A prompt's first token has no log-probability.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: list[tuple[str, bytes, float]] = []
    rank: int = 0  # of a prompt's token among all that could stand there; 0: not known


class Text(Record):
    """The additions of some steps to one completion."""

    request_id: str
    index: int
    text: str
    num_tokens: int
    tokens: list[Token] = []  # where log-probabilities are wanted
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = []  # where they are wanted
    first_seconds: float = 0.0  # of a request's first text: from when the engine had the request to its first token


class Completion(Record):
    """A whole completion."""

    index: int
    text: str
    num_tokens: int
    tokens: list[Token]
    finish_reason: str
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    token_ids: list[int] = []  # where they are wanted


class Ready(Event):
    """The model is loaded."""

    facts: chat.Loaded
    max_num_seqs: int
    vocab_size: int
    defaults: dict[str, Any] = {}  # sampling parameters that the model asks for
    chat_template: str = ""


class Telling(Event):
    """How loading goes on, or why it failed."""

    told: chat.Loading | chat.Notice | chat.LoadFailed


class Began(Event):
    """A request is accepted, if it is streamed, wants ids or opens thoughts. With ``echo`` another tells its prompt."""

    request_id: str
    prompt_text: str
    prompt_tokens: list[Token] = []
    in_reasoning: bool = False  # the template has opened the model's section of thoughts
    num_prompt_tokens: int = 0
    prompt_token_ids: list[int] = []  # where they are wanted


class Stepped(Event):
    texts: list[Text]


class Ended(Event):
    """A request has ended; ``completions`` are there where no texts were streamed."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    completions: list[Completion] = []
    in_reasoning: bool = False  # the template has opened the model's section of thoughts


class Refused(Event):
    """A request was refused or broke; ``kind`` is "usage", "context", "capacity", "internal" or "gone"."""

    request_id: str
    error: str
    kind: str = "usage"


class Result(Event):
    """The result of a call that wants one."""

    call_id: str
    value: Any = None
    error: str = ""
    kind: str = "usage"  # of the error, as of `Refused`


class Picture(Event):
    watcher: str
    changed: chat.CacheChanged


class SessionEvent(Event):
    session: str
    event: bytes  # one line


class SessionAnswered(Event):
    """An answer of a session has ended, in whatever way."""

    session: str
    request_id: str  # as the app calls it


class Figures(Event):
    """The state of the engine, about once a second while it works."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_prefill_tokens: int  # since the start
    num_decoded_tokens: int
    num_blocks: int
    used_blocks: int
    cached_blocks: int
    num_preemptions: int
    num_hit_tokens: int
    num_looked_up_tokens: int
    num_copies: int


decode_call = msgspec.msgpack.Decoder[Call](reduce(or_, Call.__subclasses__())).decode
decode_event = msgspec.msgpack.Decoder[Event](reduce(or_, Event.__subclasses__())).decode


def read_call(stream: BinaryIO) -> Call | None:
    """The next call of a stream; None at its end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return decode_call(stream.read(int.from_bytes(head, "little")))


def kind_of(error: MinillmError) -> str:
    """Return the kind of an error that a request can cause, for `Refused` and `Result`."""
    kinds = {ContextLengthError: "context", CapacityError: "capacity"}
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), "usage")


def encode(message: Call | Event) -> bytes:
    """The message behind its length; raises UsageError where a value of a stranger's cannot travel."""
    try:
        body = msgspec.msgpack.encode(message)
    except OverflowError:
        raise UsageError("a whole number has more than 64 bits; send it as text or as a decimal fraction") from None
    except RecursionError:
        raise UsageError("values are nested too deep; send flatter ones") from None
    return len(body).to_bytes(4, "little") + body
