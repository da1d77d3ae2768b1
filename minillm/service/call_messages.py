# ruff: noqa: RUF012 (msgspec copies lists and dicts that are defaults)
"""Messages between the HTTP process and the engine process.

The HTTP process sends calls, the engine process sends events. A message is four bytes with its length, followed by the
message in MessagePack. The messages that load a model, abort a request, or report a request's failure are defined in
`minillm.service.messages`.
"""

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from minillm.errors import CapacityError, ContextLengthError, MinillmError, UsageError
from minillm.service.messages import (
    Abort,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    Message,
    Notice,
    Preparing,
    Record,
    RequestFailed,
)


class Call(Message):
    """A message from the HTTP process to the engine process."""


class ServerEvent(Message):
    """A message from the engine process to the HTTP process."""


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
    ranked: bool = False  # order the completions by mean log-probability, the best first

    @property
    def is_bare(self) -> bool:
        """Return whether the answer must not contain reasoning, because the request has a grammar without reasoning."""
        return "grammar" in self.params and not self.thinks and self.params.get("max_reasoning_tokens") is None


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


class OpenSession(Call):
    """Open a session for a chat app, or for a client that only watches the block pool.

    `minillm.service.messages` defines the session's commands and events.
    """

    session: str
    tenant: str
    reader: str | None = None  # the client may see only this tenant's text; None: all text
    salt: str | None = None  # prefix cache salt of all prompts of the session
    watches: bool = False  # the client sends no commands, and gets only `CacheChanged` events


class SessionCommand(Call):
    session: str
    command: bytes  # a line, as the app sent it


class CloseSession(Call):
    session: str


class Token(Record):
    """A token with its log-probability, and the most probable tokens at its position.

    ``top`` contains (text, bytes, log-probability) of each of the most probable tokens. A prompt's first token has no
    log-probability.
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


class Began(ServerEvent):
    """The engine has accepted a request.

    This event is sent if the request is streamed or wants token ids, or if its answer begins inside the reasoning. If
    the request has ``echo``, the event is sent again before the first text, with the text and tokens of the prompt.
    """

    request_id: str
    prompt_text: str
    prompt_tokens: list[Token] = []
    in_reasoning: bool = False  # the prompt ends inside the reasoning
    num_prompt_tokens: int = 0
    prompt_token_ids: list[int] = []  # if requested
    has_reasoned: bool = False  # the answer continues reasoning that has text already


class Texts(ServerEvent):
    """The texts that a step added to all completions."""

    texts: list[Text]


class Ended(ServerEvent):
    """A request has ended. ``completions`` is empty if the texts were streamed."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    completions: list[Completion] = []
    num_reasoning_tokens: int = 0  # sum over all completions


class Result(ServerEvent):
    """The result of a call that has a ``call_id``."""

    call_id: str
    value: Any = None
    error: str = ""
    kind: str = "usage"  # kind of the error, as in `RequestFailed`


class SessionEvent(ServerEvent):
    session: str
    event: bytes  # a line for the app


class SessionAnswered(ServerEvent):
    """An answer of a session has ended for any reason, or could not be started."""

    session: str
    request_id: str  # the request's id as the app chose it


class Figures(ServerEvent):
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
    disk_bytes: int = 0  # of all blocks on disk
    num_disk_saved: int = 0  # blocks
    num_disk_read: int = 0


SessionCall = OpenSession | SessionCommand | CloseSession
AnyCall = Call | Load | Abort
AnyEvent = ServerEvent | Loading | Notice | Preparing | Loaded | LoadFailed | RequestFailed

decode_call = msgspec.msgpack.Decoder[AnyCall](reduce(or_, (Load, Abort, *Call.__subclasses__()))).decode
decode_event = msgspec.msgpack.Decoder[AnyEvent](
    reduce(or_, (Loading, Notice, Preparing, Loaded, LoadFailed, RequestFailed, *ServerEvent.__subclasses__()))
).decode


def kind_of(error: MinillmError) -> str:
    """Return the field ``kind`` of `RequestFailed` or `Result` for an error that a client can cause."""
    kinds = {ContextLengthError: "context", CapacityError: "capacity"}
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), "usage")


def encode(message: Message) -> bytes:
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
