"""The bodies of requests. An unknown field, or a field of the wrong type, raises an error that names the field.

The fields are OpenAI's (https://platform.openai.com/docs/api-reference) and our own, named as in `minillm.params`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from minillm.checks import declared
from minillm.errors import UsageError
from minillm.params import BeamSearchParams, SamplingParams, with_defaults
from minillm.service.call_messages import Conversation, ForkPoint
from minillm.text.safe import clean_line

MAX_N = 64
MAX_PROMPTS = 256  # maximum prompts of a request
_LIMITS = {**dict.fromkeys(("n", "beam_width", "best_of"), (1, MAX_N)), "logprobs": (0, 20), "top_logprobs": (0, 20)}
_GRAMMARS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}  # vLLM's names -> ours
_MOST_SHOWN = 300  # maximum characters of an error message: a field name may be as long as the body
MAX_ALLOWED = 1 << 18  # maximum number of ids in allowed_token_ids; the largest vocabularies have this size
NO_LIMIT = -1  # value of ``max_tokens`` for an answer that only the context limits, as in llama.cpp
_PARAMS = {name for cls in (SamplingParams, BeamSearchParams) for name, _, _ in declared(cls)} - {"grammar"}
_SAMPLING = {name for name, _, _ in declared(SamplingParams)}
_SEARCH = {name for name, _, _ in declared(BeamSearchParams)}
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Body = TypeVar("Body", bound=msgspec.Struct)


class BadField(UsageError):
    """Raised if a field of the request is invalid. ``field`` is its name; empty if the whole body is invalid."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # every chunk reports the tokens so far, as in vLLM
    include_obfuscation: bool = False  # has no effect, because texts are not padded


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema. It is always enforced, even if ``strict`` is false."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The grammar of an answer, in OpenAI's format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema: dict[str, Any] | None = None  # only allowed with the type "json_object", as in llama.cpp and Together
    value: dict[str, Any] | None = None  # TGI's name of ``schema``, which huggingface_hub's client sends

    def grammar(self) -> dict[str, Any] | None:
        """Return the engine's parameter ``grammar``, or None for free text. Raises BadField if fields contradict."""
        if self.type == "json_schema" and self.json_schema is None:
            raise BadField("response_format: json_schema is missing", "response_format")
        own = self.schema if self.value is None else self.value
        if own is not None and self.type != "json_object":
            raise BadField("response_format: schema only with the type json_object; use json_schema", "response_format")
        schema = own if self.json_schema is None else self.json_schema.schema
        if self.type == "text":
            return None
        return {"json_object": True} if self.type == "json_object" and schema is None else {"json_schema": schema}


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The grammar of an answer, in vLLM's format."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False  # has no effect: there is no fallback

    def forms(self) -> dict[str, dict[str, Any]]:
        """Return the engine's parameter ``grammar`` for each field that is set, by the field's name."""
        kinds = {**_GRAMMARS, "json_object": "json_object"}
        values = {name: getattr(self, name) for name in kinds} | {"json_object": self.json_object or None}
        found = {name: value for name, value in values.items() if value is not None}
        return {f"structured_outputs.{name}": {kinds[name]: value} for name, value in found.items()}


class ForkOf(msgspec.Struct, forbid_unknown_fields=True):
    """A position in an earlier answer to the same API key, from which the new answer continues."""

    id: str
    index: int = 0
    num_tokens: int | None = None


class SharedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that requests of all routes that generate text share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    # fields of our own, which at least one of the protocols does not have
    seed: int | None = None
    top_k: int | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: int = 0  # among requests of one key, lower values run first


class CommonFields(SharedFields):
    """The fields that chat requests, completion requests and requests of the Responses API share."""

    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None  # a label that the client sets; has no effect
    metadata: dict[str, str] | None = None  # labels that the client sets; they have no effect
    safety_identifier: str | None = None  # a label that the client sets; has no effect
    service_tier: str | None = None  # has no effect
    # fields of our own, which are not in OpenAI's API
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str | list[int]] | None = None
    allowed_token_ids: list[int] | None = None
    max_reasoning_tokens: int | None = None
    prompt_cache_key: str | None = None  # a field of OpenAI; has no effect, because prefixes are found without it
    prompt_cache_options: dict[str, Any] | None = None  # has no effect, for the same reason
    prompt_cache_retention: str | None = None  # has no effect: prefixes stay cached as long as there is memory


class _Generation(CommonFields):
    """The fields that chat requests and completion requests share."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None  # must not be true, because nothing is stored
    # fields of our own, which are not in OpenAI's API
    beam_width: int | None = None
    use_beam_search: bool | None = None  # use beam search with ``n`` or ``best_of`` beams
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None  # a field of vLLM; has no effect
    regex: str | None = None  # a field of SGLang
    return_token_ids: bool = False
    keep: bool = False  # keep the answer's blocks, for a later `fork_of`
    fork_of: str | ForkOf | None = None
    prompt_logprobs: int | None = None

    @property
    def fork(self) -> ForkPoint | None:
        """Return ``fork_of`` in the engine's format; None if the request does not continue from a fork."""
        of = ForkOf(self.fork_of) if isinstance(self.fork_of, str) else self.fork_of
        return None if of is None else ForkPoint(of.id, of.index, of.num_tokens)

    @property
    def has_usage(self) -> bool:
        """Return whether a stream ends with the token usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts(self) -> bool:
        """Return whether each chunk of a stream reports the token usage so far."""
        return self.has_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def grammar(self) -> dict[str, dict[str, Any]]:
        """Return the engine's parameter ``grammar`` by the name of its field; empty for free text. Raises BadField."""
        found = {} if self.structured_outputs is None else self.structured_outputs.forms()
        if self.response_format is not None and (format_ := self.response_format.grammar()) is not None:
            found["response_format"] = format_
        fields = {f"guided_{name}": kind for name, kind in _GRAMMARS.items()} | {"regex": "regex"}
        found |= {name: {kind: value} for name, kind in fields.items() if (value := getattr(self, name)) is not None}
        if len(found) > 1:
            raise BadField(f"{' and '.join(found)}: an answer follows one grammar; give one", list(found)[1])
        return found

    def check(self) -> None:
        """Raise BadField for a value that is invalid for every model."""
        if self.store:
            raise BadField("store: this server stores nothing; leave it out", "store")
        if self.stream_options is not None and not self.stream:
            raise BadField("stream_options: only with stream", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise BadField("prompt_logprobs: leave stream out", "prompt_logprobs")
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name, None)
            if value is not None and not low <= value <= high:
                raise BadField(f"{name} must be from {low} to {high}, not {value}", name)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list(dict.fromkeys(self.allowed_token_ids))
            if len(self.allowed_token_ids) > MAX_ALLOWED:
                raise BadField(f"allowed_token_ids: at most {MAX_ALLOWED} ids", "allowed_token_ids")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= 256:
            raise BadField("cache_salt must have 1 to 256 characters", "cache_salt")
        if not -(1 << 31) < self.priority < 1 << 31:
            raise BadField("priority must be above -2^31 and below 2^31", "priority")


class CompletionBody(_Generation):
    """The body of ``/v1/completions``."""

    prompt: str | list[int | str | list[int]] | None = None  # all elements of a list must be of one kind
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int] | None]:
        """Return the prompts of the request, at least one. None stands for a fork that continues without a prompt.

        Raises BadField if the prompts are missing or invalid.
        """
        found: list[Any] = [self.prompt]  # text, ids or None
        if isinstance(self.prompt, list):
            kinds = set(map(type, self.prompt))
            if len(kinds) > 1:
                raise BadField("prompt: text and ids in one list; give a list of one kind", "prompt")
            if kinds and kinds != {int}:
                found = list(self.prompt)
        if self.prompt is None and self.fork_of is None:
            raise BadField("prompt is missing", "prompt")
        if len(found) > MAX_PROMPTS:
            raise BadField(f"prompt: {len(found)} prompts; at most {MAX_PROMPTS}", "prompt")
        if self.fork_of is None and not all(found):
            raise BadField("prompt is empty; give at least one token", "prompt")
        return found

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise BadField("suffix: infilling is not supported; leave it out", "suffix")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise BadField(f"best_of {self.best_of} is below n {self.n}", "best_of")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise BadField("best_of: the best answers are known only at the end; leave stream out", "best_of")

    def params(self, defaults: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Return the engine's sampling parameters. ``defaults`` are the model's own defaults. Raises BadField."""
        values = _given(self, defaults)
        if self.max_tokens is None:
            values.setdefault("max_tokens", max(16, values.get("min_tokens", 0)))
        values["logprobs"] = self.logprobs
        if self.echo and (self.logprobs is not None or values.get("max_tokens") == 0):
            values.setdefault("prompt_logprobs", self.logprobs or 0)
        if self.best_of is not None and self.best_of > (self.n or 1) and "beam_width" not in values:
            values["n"] = self.best_of
            values["logprobs"] = self.logprobs or 0
        return _checked(values)


class ChatBody(_Generation):
    """The body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint for OpenAI's own models; has no effect

    def conversation(
        self, tools: list[dict[str, Any]] | None = None, options: Mapping[str, Any] = {}
    ) -> Conversation | None:
        """Return the conversation for the engine, with ``tools`` and the template variables ``options``.

        Return None for a fork, which has no messages. Raises BadField if messages are missing or not allowed.
        """
        if self.messages is None:
            if self.fork_of is None:
                raise BadField("messages is missing", "messages")
            return None
        if self.fork_of is not None:
            raise BadField("messages: a fork continues the answer itself; leave messages out", "messages")
        return Conversation(
            self.messages, self.add_generation_prompt, self.continue_final_message, tools, dict(options)
        )

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise BadField("top_logprobs: only with logprobs", "top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise BadField("max_tokens and max_completion_tokens mean the same, but differ; give one", "max_tokens")

    def params(self, defaults: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Return the engine's sampling parameters. ``defaults`` are the model's own defaults. Raises BadField."""
        values = _given(self, defaults)
        if self.max_completion_tokens not in (None, NO_LIMIT):
            values["max_tokens"] = self.max_completion_tokens
        values["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return _checked(values, {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"})


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/tokenize``: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # used with messages
    add_special_tokens: bool = True
    parse_special: bool = False  # parse spellings of control tokens, such as ``<|im_end|>``, as these tokens
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]


class PrefixBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/prefixes``: a prefix to compute and pin. ``messages`` are the beginning of a conversation."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # used with messages
    cache_salt: str | None = None


def read_body(kind: type[Body], data: bytes) -> Body:
    """Parse a body. Raises BadField if it is invalid. A field that is null counts as absent."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            if b"null" not in data:
                raise
            body = msgspec.json.decode(data, type=dict[str, Any])
            return msgspec.convert(_without_nulls(body), kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        field = path.split("[")[0].split(".")[0].rstrip("`")
        if "unknown field" in what or "missing required field" in what:
            field = field or what.split("`")[1]
        shown = f"{path.rstrip('`')}: " if path else ""
        message = clean_line(f"{shown}{what[:1].lower()}{what[1:]}", _MOST_SHOWN)
        raise BadField(message, clean_line(field, _MOST_SHOWN)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if found := _LONE_SURROGATE.search(data):
            raise BadField(f"the body has the lone surrogate {found[0].decode()}; send whole characters") from None
        raise BadField(f"the body is not valid JSON: {str(error)[:200]}") from None


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in body.items() if value is not None}
    options = found.get("stream_options")
    return {**found, "stream_options": _without_nulls(options)} if isinstance(options, dict) else found


def _given(body: _Generation, defaults: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name in _PARAMS if (value := getattr(body, name, None)) is not None}
    if NO_LIMIT in (body.max_tokens, getattr(body, "max_completion_tokens", None)):
        values.pop("max_tokens", None)
        defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
    for grammar in body.grammar().values():
        values["grammar"] = grammar
    if body.use_beam_search:
        values.setdefault("beam_width", getattr(body, "best_of", None) or body.n or BeamSearchParams.beam_width)
    return values if "beam_width" in values else with_defaults(values, defaults)


def _checked(values: dict[str, Any], names: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return the sampling parameters that are not None. Raises BadField for an invalid parameter.

    ``names``: parameters -> fields of the request, if they differ.
    """
    searches = "beam_width" in values
    values = {name: value for name, value in values.items() if value is not None}
    if searches and values.get("temperature") == 0:  # vLLM's clients send it: nothing is drawn at random
        del values["temperature"]
    for name in values:
        if name not in (_SEARCH if searches else _SAMPLING):
            other = (
                "not with beam search: it does not sample" if searches else "only with use_beam_search or beam_width"
            )
            raise BadField(f"{name}: {other}", name)
    if searches and "n" not in values:
        values["n"] = 1
    try:
        quick = {name: value for name, value in values.items() if name != "grammar"}  # the engine process checks it
        (BeamSearchParams if searches else SamplingParams)(**quick)
    except UsageError as error:
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        field = names.get(name, name)
        raise BadField(str(error).replace(name, field, 1), field if name in values else "") from None
    return values
