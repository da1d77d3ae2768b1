"""Messages between the HTTP process and the engine process: MessagePack, each after its length in four bytes.

The HTTP process sends calls, the engine process sends events.
"""

from functools import reduce
from operator import or_
from typing import Any, BinaryIO

import msgspec

from minillm.errors import CapacityError, ContextLengthError, MinillmError, UsageError
from minillm.service import messages as chat


class _Message(msgspec.Struct, tag=True, tag_field="message", forbid_unknown_fields=True):
    """A message. Its class name is sent with it."""


class Call(_Message):
    """A message from the HTTP process to the engine process."""


class Event(_Message):
    """A message from the engine process to the HTTP process."""


class Record(msgspec.Struct, array_like=True):
    """A part of a message, sent as a list of its values."""


class Conversation(msgspec.Struct):
    """Messages to render into a prompt with the model's chat template.

    With ``known_ids`` the prompt begins with them, and only the text after the first ``num_known`` messages is encoded.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}  # variables of the template, such as ``enable_thinking``
    known_ids: list[int] = []  # of an earlier prompt and its answer
    num_known: int = 0  # messages that they stand for, the answer included


class ForkPoint(Record):
    """A position in an earlier answer: its request, the completion, and how many of its tokens are kept."""

    request_id: str
    index: int = 0
    num_tokens: int | None = None  # None: all


class Load(Call):
    """Load a model. This is the first call and is sent once."""

    model: str
    options: dict[str, Any] = {}  # of EngineConfig


class Complete(Call):
    """Complete a prompt.

    The prompt is text, token ids or a conversation. After a fork it continues the answer, and may be empty.
    """

    request_id: str
    tenant: str  # forks may use only answers of the same tenant
    prompt: str | list[int] | Conversation | None
    params: dict[str, Any]  # of BeamSearchParams if it has "beam_width", else of SamplingParams
    streamed: bool = False  # send `Began` at once, and texts as they are generated
    echo: bool = False  # include the prompt's text in `Began`, before the first text
    wants_ids: bool = False  # include token ids in `Began` and in texts
    keep: bool = False  # keep the blocks after the end, for forks
    fork: ForkPoint | None = None
    salt: str | None = None
    schemas: dict[str, Any] = {}  # of arguments, by tool name; the grammar does not have their rules yet
    thinks: bool = False  # the grammar allows thoughts before the answer

    @property
    def is_bare(self) -> bool:
        """Return whether the answer has no thoughts: the grammar allows none, and does not wait for their end."""
        return "grammar" in self.params and not self.thinks and self.params.get("max_reasoning_tokens") is None


class Abort(Call):
    request_id: str


class Tokenize(Call):
    call_id: str
    tenant: str
    prompt: str | Conversation
    add_special_tokens: bool = True
    parse_special: bool = False
    is_bare: bool = False  # as in `Complete`, for a conversation


class Detokenize(Call):
    call_id: str
    tenant: str
    token_ids: list[int]


class PinPrefix(Call):
    """Compute a prefix and pin its blocks."""

    call_id: str
    tenant: str
    prompt: str | list[int] | Conversation
    salt: str | None = None


class UnpinPrefix(Call):
    call_id: str
    prefix_id: str


class Ping(Call):
    """Ask for the seconds that the current step has taken. Answered without waiting for the step."""

    call_id: str


class ReadCache(Call):
    call_id: str


class Watch(Call):
    """Send updates of the pool as it changes."""

    watcher: str
    reader: str | None = None  # the tenant that may see its own text only; None: sees all


class Unwatch(Call):
    watcher: str


class OpenSession(Call):
    """Open a session for a chat app. Its commands and events are defined in `minillm.service.messages`."""

    session: str
    tenant: str
    reader: str | None = None  # the tenant that may see its own text only; None: sees all
    salt: str | None = None  # prefix cache salt of all its prompts


class SessionCommand(Call):
    session: str
    command: bytes  # one line


class CloseSession(Call):
    session: str


class Token(Record):
    """A token, its log-probability, and the most probable tokens at its position as (text, bytes, log-probability).

    A prompt's first token has no log-probability.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: list[tuple[str, bytes, float]] = []
    rank: int = 0  # of a prompt token among all tokens at its position; 0: unknown


class Text(Record):
    """The text that some steps added to one completion."""

    request_id: str
    index: int
    text: str
    num_tokens: int
    tokens: list[Token] = []  # if log-probabilities are requested
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = []  # if requested
    first_seconds: float = 0.0  # in a request's first text only: the engine's time to first token


class Completion(Record):
    """A complete completion."""

    index: int
    text: str
    num_tokens: int
    tokens: list[Token]
    finish_reason: str
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    token_ids: list[int] = []  # if requested


class Ready(Event):
    """The model is loaded."""

    facts: chat.Loaded
    max_num_seqs: int
    vocab_size: int
    defaults: dict[str, Any] = {}  # the model's own sampling defaults
    chat_template: str = ""


class Telling(Event):
    """Progress of loading, or the reason for a failure."""

    told: chat.Loading | chat.Notice | chat.LoadFailed


class Began(Event):
    """A request that streams, wants ids or opens thoughts was accepted. With ``echo``, sent again with the prompt."""

    request_id: str
    prompt_text: str
    prompt_tokens: list[Token] = []
    in_reasoning: bool = False  # the template has opened the model's <think> section
    num_prompt_tokens: int = 0
    prompt_token_ids: list[int] = []  # if requested


class Stepped(Event):
    texts: list[Text]


class Ended(Event):
    """A request has ended. ``completions`` is empty if texts were streamed."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    completions: list[Completion] = []
    in_reasoning: bool = False  # the template has opened the model's <think> section
    num_reasoning_tokens: int = 0  # of all completions


class Refused(Event):
    """A request was rejected or failed. ``kind`` is "usage", "context", "capacity", "internal" or "gone"."""

    request_id: str
    error: str
    kind: str = "usage"


class Result(Event):
    """The result of a call that has a ``call_id``."""

    call_id: str
    value: Any = None
    error: str = ""
    kind: str = "usage"  # of the error, as in `Refused`


class Picture(Event):
    watcher: str
    changed: chat.CacheChanged


class SessionEvent(Event):
    session: str
    event: bytes  # one line


class SessionAnswered(Event):
    """An answer of a session has ended, for any reason."""

    session: str
    request_id: str  # the app's name for it


class Figures(Event):
    """The state of the engine, about once a second while it works."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_prefill_tokens: int  # since the start
    num_decoded_tokens: int
    num_blocks: int
    block_size: int
    used_blocks: int
    cached_blocks: int
    num_preemptions: int
    num_hit_tokens: int
    num_looked_up_tokens: int
    num_copies: int


decode_call = msgspec.msgpack.Decoder[Call](reduce(or_, Call.__subclasses__())).decode
decode_event = msgspec.msgpack.Decoder[Event](reduce(or_, Event.__subclasses__())).decode


def read_call(stream: BinaryIO) -> Call | None:
    """Return the next call of a stream, None at its end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return decode_call(stream.read(int.from_bytes(head, "little")))


def kind_of(error: MinillmError) -> str:
    """Return the kind of an error that a request can cause, for `Refused` and `Result`."""
    kinds = {ContextLengthError: "context", CapacityError: "capacity"}
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), "usage")


def encode(message: Call | Event) -> bytes:
    """Return the message after its length. Raises UsageError for a client's value that cannot be encoded."""
    try:
        body = msgspec.msgpack.encode(message)
    except OverflowError:
        raise UsageError("a whole number has more than 64 bits; send it as text or as a decimal fraction") from None
    except RecursionError:
        raise UsageError("values are nested too deep; send flatter ones") from None
    return len(body).to_bytes(4, "little") + body
