"""The HTTP routes that generate text in OpenAI's format."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request

from minillm.server import bodies
from minillm.server.answers import Frame
from minillm.server.bodies import ChatBody, CompletionBody
from minillm.server.completions.forms import ChatForm, TextForm
from minillm.server.generating import Asked, Form, Framing, Generating
from minillm.server.parsers.thoughts import ThoughtReader, template_options, with_effort
from minillm.server.parsers.tool_choice import call_form, call_formats, choice_of
from minillm.server.service import Service
from minillm.service import call_messages as messages


@dataclass(frozen=True)
class ChatCall:
    """The engine's call for a chat request.

    Attributes:
        reader: creates a reader for an answer's text. Its argument is whether the answer begins inside the reasoning.
        grammar_field: the request's field that makes tool calls follow a grammar. Error messages name this field. It is
            empty if tool calls follow no grammar.
    """

    call: messages.Complete
    reader: Callable[[bool], ThoughtReader]
    grammar_field: str


def chat_call(service: Service, tenant: str, name: str, body: ChatBody) -> ChatCall:
    """Return the engine's call for a chat request. ``name`` is the request's id. Raises BadField."""
    choice = choice_of(body)
    template, has_switch = service.facts.chat_template, service.facts.has_thinking_switch
    options = template_options(body, template, has_switch=has_switch)
    params = body.params(service.facts.defaults)
    params = with_effort(params, body.reasoning_effort, template, has_switch=has_switch)
    calls, formats = call_form(template), call_formats(template)
    if choice.schemas:
        params["grammar"] = choice.grammar(calls)
    call = messages.Complete(
        name,
        tenant,
        body.conversation([dict(tool) for tool in choice.tools] or None, options),
        params,
        streamed=bool(body.stream),
        wants_ids=body.return_token_ids,
        keep=body.keep,
        fork=body.fork,
        salt=service.salt(tenant, body.cache_salt, body.fork),
        schemas=choice.schemas,
        echo=body.prompt_logprobs is not None,
        thinks=not choice.required and bool(calls.tag) and bool(choice.schemas),
    )

    def reader(opened: bool) -> ThoughtReader:
        return ThoughtReader(choice.reader(calls, formats), opened=opened)

    return ChatCall(call, reader, "tools" if choice.schemas else "")


async def chat(service: Service, request: Request) -> Generating:
    body = bodies.read_body(ChatBody, request.state.body)
    body.check()
    service.check_model(body.model)
    name, tenant = f"chatcmpl-{secrets.token_hex(12)}", request.state.tenant
    made = chat_call(service, tenant, name, body)
    frame = Frame(name, service.names[0], "chat.completion")
    form = ChatForm(bool(body.logprobs), made.reader, body.prompt_logprobs is not None)
    return generating(service, body, tenant, [made.call], frame, form, grammar_field=made.grammar_field)


async def complete(service: Service, request: Request) -> Generating:
    body = bodies.read_body(CompletionBody, request.state.body)
    body.check()
    service.check_model(body.model)
    name, tenant, prompts, params = (
        f"cmpl-{secrets.token_hex(12)}",
        request.state.tenant,
        body.prompts(),
        body.params(service.facts.defaults),
    )
    echo = body.echo or body.prompt_logprobs is not None
    one = messages.Complete(
        name,
        tenant,
        None,
        params,
        streamed=bool(body.stream),
        echo=echo,
        wants_ids=body.return_token_ids,
        keep=body.keep,
        fork=body.fork,
        salt=service.salt(tenant, body.cache_salt, body.fork),
    )
    copy = msgspec.structs.replace
    calls = [copy(one, request_id=f"{name}-{number}", prompt=prompt) for number, prompt in enumerate(prompts)]
    if len(calls) == 1:
        calls[0].request_id = name
    form = TextForm(body.n or 1, body.echo, body.logprobs is not None, body.prompt_logprobs is not None)
    frame = Frame(name, service.names[0], "text_completion")
    return generating(service, body, tenant, calls, frame, form)


def generating(
    service: Service,
    body: ChatBody | CompletionBody,
    tenant: str,
    calls: list[messages.Complete],
    frame: Framing,
    form: Form,
    grammar_field: str = "",
) -> Generating:
    """Return the response that generates the answers to ``calls``."""
    asked = Asked(
        tenant, calls, frame, form, bool(body.stream), body.has_usage, body.counts, grammar_field, body.priority
    )
    return Generating(asked, service.engine, service.queue, service.metrics, service.send_seconds)


async def count_prompt_tokens(service: Service, call: messages.Complete) -> int:
    """Return the number of prompt tokens of ``call``, a call for a chat request. No answer is generated."""
    assert isinstance(call.prompt, messages.Conversation)
    make = partial(messages.Tokenize, tenant=call.tenant, prompt=call.prompt, is_bare=call.is_bare)
    return len((await service.engine.ask(make))["tokens"])
