"""The HTTP routes that generate text."""

from __future__ import annotations

import secrets

import msgspec
from starlette.requests import Request

from minillm.server import bodies, messages
from minillm.server.answers import Frame
from minillm.server.bodies import ChatBody, CompletionBody
from minillm.server.forms import ChatForm, TextForm
from minillm.server.generating import Asked, Generating
from minillm.server.service import Service
from minillm.server.thoughts import ThoughtReader, template_options
from minillm.server.tool_choice import call_form, call_formats, choice_of


async def chat(service: Service, request: Request) -> Generating:
    body = bodies.read_body(ChatBody, request.state.body)
    body.check()
    service.check_model(body.model)
    choice = choice_of(body)
    options = template_options(body, has_switch=service.facts.facts.has_thinking_switch)
    params = body.params(service.facts.defaults)
    calls, formats = call_form(service.facts.chat_template), call_formats(service.facts.chat_template)
    if choice.schemas:
        params["grammar"] = choice.grammar(calls)
    name, tenant = f"chatcmpl-{secrets.token_hex(12)}", request.state.tenant
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
    frame = Frame(name, service.names[0], "chat.completion")

    def reader(opened: bool) -> ThoughtReader:
        return ThoughtReader(choice.reader(calls, formats), opened=opened)

    form = ChatForm(bool(body.logprobs), reader, body.prompt_logprobs is not None)
    return _generating(service, body, tenant, [call], frame, form, grammar_field="tools" if choice.schemas else "")


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
    return _generating(service, body, tenant, calls, frame, form)


def _generating(
    service: Service,
    body: ChatBody | CompletionBody,
    tenant: str,
    calls: list[messages.Complete],
    frame: Frame,
    form: ChatForm | TextForm,
    grammar_field: str = "",
) -> Generating:
    asked = Asked(
        tenant, calls, frame, form, bool(body.stream), body.has_usage, body.counts, grammar_field, body.priority
    )
    return Generating(asked, service.engine, service.queue, service.metrics, service.send_seconds)
