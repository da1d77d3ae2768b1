"""Messages between the HTTP process and the engine process.

The HTTP process sends calls, the engine process sends events. A message is four bytes with its length, followed by the
message in MessagePack.
"""

from functools import reduce
from operator import or_
from typing import Any, BinaryIO

import msgspec

from minillm.errors import CapacityError, ContextLengthError, MinillmError, UsageError
from minillm.service import messages as chat


class _Message(msgspec.Struct, tag=True, tag_field="message", forbid_unknown_fields=True):
    """A message. Its class name is sent in the field ``message``."""


class Call(_Message):
    """A message from the HTTP process to the engine process."""


class Event(_Message):
    """A message from the engine process to the HTTP process."""


class Record(msgspec.Struct, array_like=True):
    """A part of a message. It is sent as a list of its values."""


class Conversation(msgspec.Struct):
    """Messages that the model's chat template renders as a prompt.

    If the token ids of the first ``num_known`` messages are known, the prompt begins with ``known_ids``. Then only the
    text after these messages is rendered and encoded.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}  # variables of the template, such as ``enable_thinking``
    known_ids: list[int] = []  # token ids of an earlier prompt and its answer
    num_known: int = 0  # number of messages that ``known_ids`` stand for, including the answer


class ForkPoint(Record):
    """A position in an earlier answer, from which a new answer continues."""

    request_id: str  # the request of the earlier answer
    index: int = 0  # index of the completion
    num_tokens: int | None = None  # number of the completion's tokens before the fork; None: all


class Load(Call):
    """Load a model. This must be the first call. It is sent once."""

    model: str
    options: dict[str, Any] = {}  # of EngineConfig


class Complete(Call):
    """Complete a prompt, which is text, token ids or a conversation.

    With a ``fork``, the prompt is appended to the earlier answer, and may be None or empty.
    """

    request_id: str
    tenant: str  # the tenant of the client; a fork may continue only an answer to the same tenant
    prompt: str | list[int] | Conversation | None
    params: dict[str, Any]  # fields of BeamSearchParams if it has "beam_width", else of SamplingParams
    streamed: bool = False  # send `Began` at once, and send texts as they are generated
    echo: bool = False  # send `Began` with the prompt's text and tokens before the first text
    wants_ids: bool = False  # include token ids in `Began` and in texts
    keep: bool = False  # keep the answer's blocks in the pool after its end, for forks
    fork: ForkPoint | None = None
    salt: str | None = None  # salt of the prompt's blocks in the prefix cache
    schemas: dict[str, Any] = {}  # schemas of tools' arguments by tool name; the grammar gets a rule for each
    thinks: bool = False  # the grammar itself allows reasoning before the answer

    @property
    def is_bare(self) -> bool:
        """Return whether the answer must not contain reasoning, because it has a grammar that allows none."""
        return "grammar" in self.params and not self.thinks and self.params.get("max_reasoning_tokens") is None


class Abort(Call):
    request_id: str


class Tokenize(Call):
    call_id: str
    tenant: str
    prompt: str | Conversation
    add_special_tokens: bool = True
    parse_special: bool = False
    is_bare: bool = False  # for a conversation: count the tokens as for a `Complete` that is bare


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
    """Ask for how long the current step has run, in seconds. The result is sent without waiting for the step."""

    call_id: str


class ReadCache(Call):
    call_id: str


class Watch(Call):
    """Start sending cache changes (`Picture`) to ``watcher``."""

    watcher: str
    reader: str | None = None  # the tenant that may see its own text only; None: sees all


class Unwatch(Call):
    watcher: str


class OpenSession(Call):
    """Open a session for a chat app. `minillm.service.messages` defines the session's commands and events."""

    session: str
    tenant: str
    reader: str | None = None  # the tenant that may see its own text only; None: sees all
    salt: str | None = None  # prefix cache salt of all prompts of the session


class SessionCommand(Call):
    session: str
    command: bytes  # one line


class CloseSession(Call):
    session: str


class Token(Record):
    """A token with its log-probability, and the most probable tokens at its position.

    ``top`` contains (text, bytes, log-probability) of each of these. A prompt's first token has no log-probability.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: list[tuple[str, bytes, float]] = []
    rank: int = 0  # rank of a prompt token among all tokens at its position; 0: unknown


class Text(Record):
    """The text that one or more steps added to a completion."""

    request_id: str
    index: int
    text: str
    num_tokens: int
    tokens: list[Token] = []  # empty unless log-probabilities are requested
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = []  # if requested
    first_seconds: float = 0.0  # the engine's time to first token; 0 except in the request's first text


class Completion(Record):
    """A completion that has ended."""

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
    """The model is loaded, and the engine accepts calls."""

    facts: chat.Loaded
    max_num_seqs: int
    vocab_size: int
    defaults: dict[str, Any] = {}  # the model's own sampling defaults
    chat_template: str = ""


class Telling(Event):
    """Progress of loading the model, a notice for the user, or the reason why the model cannot be loaded."""

    told: chat.Loading | chat.Notice | chat.LoadFailed


class Began(Event):
    """The engine has accepted a request.

    This event is sent if the request is streamed, wants token ids, or begins inside the reasoning. If the request has
    ``echo``, it is sent again before the first text, with the text and tokens of the prompt.
    """

    request_id: str
    prompt_text: str
    prompt_tokens: list[Token] = []
    in_reasoning: bool = False  # the template has opened the model's <think> section
    num_prompt_tokens: int = 0
    prompt_token_ids: list[int] = []  # if requested


class Stepped(Event):
    texts: list[Text]


class Ended(Event):
    """A request has ended. ``completions`` is empty if the texts were streamed."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    completions: list[Completion] = []
    in_reasoning: bool = False  # the template has opened the model's <think> section
    num_reasoning_tokens: int = 0  # sum over all completions


class Refused(Event):
    """A request was rejected or has failed. ``kind`` is "usage", "context", "capacity", "internal" or "gone"."""

    request_id: str
    error: str
    kind: str = "usage"


class Result(Event):
    """The result of a call that has a ``call_id``."""

    call_id: str
    value: Any = None
    error: str = ""
    kind: str = "usage"  # kind of the error, as in `Refused`


class Picture(Event):
    watcher: str
    changed: chat.CacheChanged


class SessionEvent(Event):
    session: str
    event: bytes  # one line


class SessionAnswered(Event):
    """An answer of a session has ended for any reason, or could not be started."""

    session: str
    request_id: str  # the request's id as the app chose it


class Figures(Event):
    """The state of the engine. It is sent about twice a second while the engine works, if it has changed."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_prefill_tokens: int  # since the start of the process
    num_decoded_tokens: int  # since the start of the process
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
    """Return the next call in a stream; None at its end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return decode_call(stream.read(int.from_bytes(head, "little")))


def kind_of(error: MinillmError) -> str:
    """Return the field ``kind`` of `Refused` or `Result` for an error that a client can cause."""
    kinds = {ContextLengthError: "context", CapacityError: "capacity"}
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), "usage")


def encode(message: Call | Event) -> bytes:
    """Encode a message: its length, followed by the message in MessagePack.

    Raises UsageError if the message contains a client's value that cannot be encoded.
    """
    try:
        body = msgspec.msgpack.encode(message)
    except OverflowError:
        raise UsageError("a whole number has more than 64 bits; send it as text or as a decimal fraction") from None
    except RecursionError:
        raise UsageError("values are nested too deep; send flatter ones") from None
    return len(body).to_bytes(4, "little") + body
