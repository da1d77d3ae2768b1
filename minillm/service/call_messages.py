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
    """A message. Its class name is sent in the field ``message``."""


class Call(_Message):
    """A message from the HTTP process to the engine process."""


class Event(_Message):
    """A message from the engine process to the HTTP process."""


class Record(msgspec.Struct, array_like=True):
    """A part of a message. It is sent as a list of its values."""


class Conversation(msgspec.Struct):
    """Messages to render into a prompt with the model's chat template.

    With ``known_ids`` the prompt begins with them, and only the text after the first ``num_known`` messages is encoded.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}  # variables of the template, such as ``enable_thinking``
    known_ids: list[int] = []  # token ids of an earlier prompt with its answer
    num_known: int = 0  # number of first messages that these ids stand for, including the answer


class ForkPoint(Record):
    """A position in an earlier answer: its request, the completion's index, and the number of tokens to keep."""

    request_id: str
    index: int = 0
    num_tokens: int | None = None  # None: all


class Load(Call):
    """Load a model. This is the first call, and is sent once."""

    model: str
    options: dict[str, Any] = {}  # of EngineConfig


class Complete(Call):
    """Complete a prompt, which is text, token ids or a conversation.

    After a fork, the prompt continues the earlier answer. It may then be empty.
    """

    request_id: str
    tenant: str  # the tenant of the client; forks may use only answers to the same tenant
    prompt: str | list[int] | Conversation | None
    params: dict[str, Any]  # of BeamSearchParams if it has "beam_width", else of SamplingParams
    streamed: bool = False  # send `Began` at once, and texts as they are generated
    echo: bool = False  # include the prompt's text in `Began`, before the first text
    wants_ids: bool = False  # include token ids in `Began` and in texts
    keep: bool = False  # keep the blocks after the end, for forks
    fork: ForkPoint | None = None
    salt: str | None = None
    schemas: dict[str, Any] = {}  # schemas of arguments by tool name, to be added to the grammar
    thinks: bool = False  # the grammar itself allows reasoning before the answer

    @property
    def is_bare(self) -> bool:
        """Return whether the answer has no reasoning: its grammar begins with the answer and allows no reasoning."""
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
    """Ask for how long the current step has run, in seconds. The answer does not wait for the step."""

    call_id: str


class ReadCache(Call):
    call_id: str


class Watch(Call):
    """Send cache changes to ``watcher`` from now on."""

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
    """Progress of loading the model, or the reason why it cannot be loaded."""

    told: chat.Loading | chat.Notice | chat.LoadFailed


class Began(Event):
    """A request was accepted. Sent if the request streams, wants token ids, or begins inside the reasoning.

    With ``echo``, it is sent again before the first text, with the text and tokens of the prompt.
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
    """A request has ended. ``completions`` is empty if their texts were streamed."""

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
    request_id: str  # the app's own name of the request


class Figures(Event):
    """The state of the engine. It is sent about twice a second while the engine works, if it has changed."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_prefill_tokens: int  # this and the next count since the start of the process
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
    """Return the next call in a stream; None at its end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return decode_call(stream.read(int.from_bytes(head, "little")))


def kind_of(error: MinillmError) -> str:
    """Return the kind of an error that a client can cause, for `Refused` and `Result`."""
    kinds = {ContextLengthError: "context", CapacityError: "capacity"}
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), "usage")


def encode(message: Call | Event) -> bytes:
    """Return a message in MessagePack, after its length.

    Raises UsageError for a client's value that cannot be encoded.
    """
    try:
        body = msgspec.msgpack.encode(message)
    except OverflowError:
        raise UsageError("a whole number has more than 64 bits; send it as text or as a decimal fraction") from None
    except RecursionError:
        raise UsageError("values are nested too deep; send flatter ones") from None
    return len(body).to_bytes(4, "little") + body
