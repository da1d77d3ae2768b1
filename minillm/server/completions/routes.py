"""The HTTP routes that generate text in OpenAI's format."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from minillm.server import bodies
from minillm.server.answers import Frame, Json
from minillm.server.bodies import BadField, ChatBody, CompletionBody
from minillm.server.client import Answer
from minillm.server.completions.formatters import ChatFormatter, TextFormatter
from minillm.server.generating import Formatter, GeneratedResponse, ParsedRequest, ResponseEncoder
from minillm.server.parsers.thoughts import ThoughtReader, template_options, with_effort
from minillm.server.parsers.tool_choice import call_form, call_formats, choice_of
from minillm.server.service import Service
from minillm.service import call_messages as messages


@dataclass(frozen=True)
class ChatCall:
    """The engine's call for a chat request.

    Attributes:
        reader: creates a reader for the text of an answer that has begun.
        names: `ParsedRequest.names`, for the engine's errors.
    """

    body: ChatBody
    call: messages.Complete
    reader: Callable[[Answer], ThoughtReader]
    names: Mapping[str, str]

    def response(self, service: Service, encoder: ResponseEncoder, formatter: Formatter) -> GeneratedResponse:
        """Return the response that generates the answer."""
        return generating(service, self.body, [self.call], encoder, formatter, self.names)


def chat_call(service: Service, tenant: str, name: str, body: ChatBody, names: Mapping[str, str] = {}) -> ChatCall:
    """Return the engine's call for a chat request. Raises BadField, or HTTPError for an unknown model.

    Args:
        name: the request's id.
        names: fields of a chat request -> names of the same fields in the request's own API. Errors use these names.
    """
    try:
        return _chat_call(service, tenant, name, body, names)
    except BadField as error:
        field = names.get(error.field, error.field)
        text = str(error).replace(error.field, field, 1)
        if names and (tool := re.match(r"(tools\[\d+\])\.function(\.parameters)?", text)):
            own = f".{names.get('parameters', 'parameters')}" if tool[2] else ""
            text = f"{tool[1]}{own}{text[tool.end() :]}"  # a tool of the other APIs is the function itself
        raise BadField(text, field) from None


def _chat_call(service: Service, tenant: str, name: str, body: ChatBody, names: Mapping[str, str]) -> ChatCall:
    body.check()
    service.check_model(body.model)
    choice = choice_of(body)
    template, has_switch = service.facts.chat_template, service.facts.has_thinking_switch
    options = template_options(body, template, has_switch=has_switch)
    params = body.params(service.facts.defaults)
    params = with_effort(params, body.reasoning_effort, template, has_switch=has_switch)
    calls, formats = call_form(template), call_formats(template)
    if choice.schemas:
        params["grammar"] = choice.grammar(calls)
    conversation = body.conversation([dict(tool) for tool in choice.tools] or None, options)
    thinks = bool(calls.tag) and bool(choice.strict) and choice.answer is None
    call = _call(service, tenant, name, body, conversation, params, schemas=choice.schemas, thinks=thinks)

    def reader(answer: Answer) -> ThoughtReader:
        inner = choice.reader(calls, formats)
        return ThoughtReader(inner, opened=answer.in_reasoning, has_reasoned=answer.has_reasoned)

    grammar = "tools" if choice.required or choice.strict else _grammar_field(body)
    return ChatCall(body, call, reader, {**names, "grammar": names.get(grammar, grammar)})


async def chat(service: Service, request: Request) -> GeneratedResponse:
    body, name = bodies.read_body(ChatBody, request.state.body), f"chatcmpl-{secrets.token_hex(12)}"
    made = chat_call(service, request.state.tenant, name, body)
    formatter = ChatFormatter(bool(body.logprobs), made.reader, body.prompt_logprobs is not None)
    return made.response(service, Frame(name, service.names[0], "chat.completion"), formatter)


async def complete(service: Service, request: Request) -> GeneratedResponse:
    body = bodies.read_body(CompletionBody, request.state.body)
    body.check()
    service.check_model(body.model)
    name, prompts, params = f"cmpl-{secrets.token_hex(12)}", body.prompts(), body.params(service.facts.defaults)
    names = [name] if len(prompts) == 1 else [f"{name}-{number}" for number in range(len(prompts))]
    pairs = zip(names, prompts, strict=True)
    ranked = params.get("n", 1) > (body.n or 1)
    calls = [_call(service, request.state.tenant, each, body, prompt, params, ranked=ranked) for each, prompt in pairs]
    formatter = TextFormatter(body.n or 1, body.echo, body.logprobs is not None, body.prompt_logprobs is not None)
    encoder = Frame(name, service.names[0], "text_completion")
    return generating(service, body, calls, encoder, formatter, {"grammar": _grammar_field(body)})


def _grammar_field(body: ChatBody | CompletionBody) -> str:
    """Return the name of the field that has the request's grammar; empty without a grammar."""
    return next(iter(body.grammar()), "")


def _call(
    service: Service, tenant: str, name: str, body: ChatBody | CompletionBody, prompt: Any, params: Json, **more: Any
) -> messages.Complete:
    """Return the engine's call for one prompt of a request. ``more``: further fields of `Complete`."""
    return messages.Complete(
        name,
        tenant,
        prompt,
        params,
        streamed=bool(body.stream),
        echo=body.prompt_logprobs is not None or (isinstance(body, CompletionBody) and body.echo),
        wants_ids=body.return_token_ids,
        keep=body.keep,
        fork=body.fork,
        salt=service.salt(tenant, body.cache_salt, body.fork),
        **more,
    )


def generating(
    service: Service,
    body: ChatBody | CompletionBody,
    calls: list[messages.Complete],
    encoder: ResponseEncoder,
    formatter: Formatter,
    names: Mapping[str, str] = {},
) -> GeneratedResponse:
    """Return the response that generates the answers to ``calls``. ``names``: see `ParsedRequest`."""
    streamed = bool(body.stream)
    request = ParsedRequest(
        calls[0].tenant, calls, encoder, formatter, streamed, body.has_usage, body.counts, names, body.priority
    )
    return GeneratedResponse(request, service.engine, service.queue, service.metrics, service.send_seconds)


async def count_prompt_tokens(service: Service, call: messages.Complete) -> int:
    """Return the number of prompt tokens of ``call``, a call for a chat request. No answer is generated."""
    assert isinstance(call.prompt, messages.Conversation)
    make = partial(messages.Tokenize, tenant=call.tenant, prompt=call.prompt, is_bare=call.is_bare)
    return len((await service.engine.ask(make))["tokens"])
