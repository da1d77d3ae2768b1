"""The HTTP routes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import minillm
from minillm.checks import shown
from minillm.errors import ContextLengthError, MinillmError, UsageError
from minillm.server import bodies, messages
from minillm.server.access import Access, AccessRules
from minillm.server.answers import Frame
from minillm.server.bodies import BadField, ChatBody, CompletionBody
from minillm.server.engine_process import EngineDied
from minillm.server.fair_queue import FairQueue, Full
from minillm.server.forms import ChatForm, TextForm
from minillm.server.generating import CONTEXT_LENGTH, Asked, Generating, error_json
from minillm.server.metrics import Metrics
from minillm.server.openapi import document
from minillm.server.questions import Questions
from minillm.server.replicas import Engine
from minillm.server.sharing import leaves_some
from minillm.server.thoughts import ThoughtReader, template_options
from minillm.server.tool_choice import call_form, call_formats, choice_of, shown_tools

_PING_SECONDS = 15.0  # between pings on a stream of events that has nothing to send
_MOST_WATCHERS = 32
_MOST_TOKENS = 1 << 17  # decoded in one request
_MOST_UNREAD = 256  # events queued for a slow watcher before it loses its stream


class UnknownModel(HTTPException):
    """A request names a model that this server does not serve."""


@dataclass
class Service:
    """Shared state of the routes."""

    engine: Engine
    facts: messages.Ready
    names: tuple[str, ...]  # of the model
    queue: FairQueue
    metrics: Metrics
    has_keys: bool = False  # one key may not read another's text
    shared: bool = False  # several keys: none may take everything, or detect another's prompts in the cache
    send_seconds: float = 60.0
    prefixes: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    sessions: dict[str, Questions] = field(default_factory=dict)
    watchers: Counter[str] = field(default_factory=Counter)  # open streams of events, by tenant
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # set when streams without an end must end

    def forget(self, replica: int) -> None:
        """Forget everything kept by an engine that has ended."""
        self.prefixes = {id: each for id, each in self.prefixes.items() if each.get("replica", 0) != replica}

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModel for any other model: requests never load one."""
        if name is not None and name not in self.names:
            raise UnknownModel(404, f"the model {shown(name)} is not served here; use {self.names[0]}")


Handler = tuple[str, str, Callable[[Service, Request], Awaitable[Any]]]  # method, path, and the function


def make_app(service: Service, rules: AccessRules) -> ASGIApp:
    """Return the application with access control."""
    generating: list[Handler] = [
        ("POST", "/v1/chat/completions", _chat),
        ("POST", "/v1/completions", _completions),
    ]
    others: list[Handler] = [
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:path}", _model),
        ("GET", "/health", _health),
        ("GET", "/version", _version),
        ("GET", "/metrics", _metrics),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/v1/prefixes", _list_prefixes),
        ("POST", "/v1/prefixes", _pin),
        ("DELETE", "/v1/prefixes/{name}", _unpin),
        ("GET", "/v1/cache", _cache),
        ("GET", "/v1/cache/events", _cache_events),
        ("GET", "/v1/session", _open_session),
        ("POST", "/v1/session/{name}", _session_command),
        ("GET", "/openapi.json", _openapi),
    ]

    def routes_of(handlers: list[Handler]) -> list[Route]:
        return [Route(path, _endpoint(service, handler), methods=[method]) for method, path, handler in handlers]

    short = routes_of(generating)
    errors: dict[Any, Any] = {HTTPException: _on_http, Exception: _on_defect}
    middleware = [Middleware(Shortcut, short)]
    app = Starlette(routes=[*short, *routes_of(others)], exception_handlers=errors, middleware=middleware)
    return Access(app, rules, service.metrics)


class Shortcut:
    """An ASGI layer that leads directly to the generating routes.

    Starlette tries one route after another and wraps each in several layers. They would delay the first token and every
    chunk after it.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self.app = app
        self._routes = {(method, route.path): route for route in routes for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request)
        except HTTPException as error:
            response = await _on_http(request, error)
        await response(scope, receive, send)


def _endpoint(service: Service, handler: Callable[[Service, Request], Awaitable[Any]]) -> Any:
    async def endpoint(request: Request) -> Any:
        try:
            return await handler(service, request)
        except BadField as error:
            return _json(error_json(400, str(error), error.field), 400)
        except EngineDied as error:
            return _json(error_json(503, str(error)), 503)
        except UsageError as error:
            code = CONTEXT_LENGTH if isinstance(error, ContextLengthError) else None
            return _json(error_json(400, str(error), code=code), 400)
        except MinillmError as error:
            return _json(error_json(500, str(error)), 500)

    endpoint.__name__ = handler.__name__
    return endpoint


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "model_not_found" if isinstance(error, UnknownModel) else None
    answer = _json(error_json(error.status_code, str(error.detail), code=code), error.status_code)
    answer.headers.update(error.headers or {})
    if error.status_code == 405:
        answer.headers["allow"] = ", ".join(sorted(_methods(request)))
    return answer


def _methods(request: Request) -> set[str]:
    """Return the methods that the request's path allows."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in route.methods or ()}


async def _on_defect(request: Request, error: Exception) -> Response:
    return _json(error_json(500, "internal error; see the server's log"), 500)


# --- generation -------------------------------------------------------------------------------------------------------


async def _chat(service: Service, request: Request) -> Generating:
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
        salt=_salt(service, tenant, body.cache_salt, body.fork),
        schemas=choice.schemas,
        echo=body.prompt_logprobs is not None,
        thinks=not choice.required and bool(calls.tag) and bool(choice.schemas),
    )
    frame = Frame(name, service.names[0], "chat.completion")

    def reader(opened: bool) -> ThoughtReader:
        return ThoughtReader(choice.reader(calls, formats), opened=opened)

    form = ChatForm(bool(body.logprobs), reader, body.prompt_logprobs is not None)
    return _generating(service, body, tenant, [call], frame, form, grammar_field="tools" if choice.schemas else "")


async def _completions(service: Service, request: Request) -> Generating:
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
        salt=_salt(service, tenant, body.cache_salt, body.fork),
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


def _salt(service: Service, tenant: str, salt: str | None = None, fork: messages.ForkPoint | None = None) -> str | None:
    """Return the salt of the prefix cache. Each key has its own, or a key could detect another's prompts.

    A fork without a salt uses its answer's salt.
    """
    if salt is None and (fork is not None or not service.shared):
        return None
    return f"{tenant}\n{salt or ''}"


# --- models, tokens, health -------------------------------------------------------------------------------------------


def _model_json(service: Service, name: str) -> dict[str, Any]:
    facts = service.facts.facts
    owner = {"id": name, "object": "model", "created": int(service.began), "owned_by": "minillm"}
    return {**owner, "max_model_len": facts.max_model_len, "source": facts.source}


async def _models(service: Service, request: Request) -> Response:
    return _json({"object": "list", "data": [_model_json(service, name) for name in service.names]})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.check_model(name)
    return _json(_model_json(service, name))


async def _health(service: Service, request: Request) -> Response:
    engine = service.engine
    return _json({"status": engine.trouble or "ok"}, 200 if engine.serves else 503)


async def _version(service: Service, request: Request) -> Response:
    return _json({"version": minillm.__version__})


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _tokenize(service: Service, request: Request) -> Response:
    body = bodies.read_body(bodies.TokenizeBody, request.state.body)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadField("give either prompt or messages", "prompt")
    prompt: Any = body.prompt
    if body.messages is not None:
        prompt = messages.Conversation(body.messages, body.add_generation_prompt, tools=shown_tools(body.tools))
    make = partial(
        messages.Tokenize,
        tenant=request.state.tenant,
        prompt=prompt,
        add_special_tokens=body.add_special_tokens,
        parse_special=body.parse_special,
    )
    found = await service.engine.ask(make)
    value = {
        "tokens": found["tokens"],
        "count": len(found["tokens"]),
        "max_model_len": service.facts.facts.max_model_len,
    }
    if body.return_token_strs:
        value["token_strs"] = found["texts"]
    return _json(value)


async def _detokenize(service: Service, request: Request) -> Response:
    body = bodies.read_body(bodies.DetokenizeBody, request.state.body)
    service.check_model(body.model)
    most, end = max(_MOST_TOKENS, service.facts.facts.max_model_len), service.facts.vocab_size
    if len(body.tokens) > most:
        raise BadField(f"tokens: {len(body.tokens)} ids; at most {most}, so send them in parts", "tokens")
    for token_id in body.tokens:
        if not 0 <= token_id < end:
            raise BadField(f"tokens: {token_id} is not from 0 to {end - 1}", "tokens")
    make = partial(messages.Detokenize, tenant=request.state.tenant, token_ids=body.tokens)
    return _json({"prompt": await service.engine.ask(make)})


# --- prefixes and the pool --------------------------------------------------------------------------------------------


async def _list_prefixes(service: Service, request: Request) -> Response:
    own = [each for each in service.prefixes.values() if each["tenant"] == request.state.tenant]
    return _json({"object": "list", "data": [_without_tenant(each) for each in own]})


async def _pin(service: Service, request: Request) -> Response:
    body = bodies.read_body(bodies.PrefixBody, request.state.body)
    if (body.prompt is None) == (body.messages is None):
        raise BadField("give either prompt or messages", "prompt")
    prompt: Any = body.prompt
    if body.messages is not None:
        prompt = messages.Conversation(body.messages, add_generation_prompt=False, tools=shown_tools(body.tools))
    elif not prompt:
        raise BadField("prompt is empty; give at least one token", "prompt")
    tenant = request.state.tenant
    salt = _salt(service, tenant, body.cache_salt)
    make = partial(messages.PinPrefix, tenant=tenant, prompt=prompt, salt=salt)
    found = {"object": "prefix", "created": int(time.time()), **await service.engine.ask(make)}
    service.prefixes[found["id"]] = {**found, "tenant": tenant}
    return _json(found)


async def _unpin(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    prefix = service.prefixes.get(name)
    if prefix is None or prefix["tenant"] != request.state.tenant:
        raise HTTPException(404, f"there is no prefix {shown(name)}")
    del service.prefixes[name]
    return _json(await service.engine.ask(partial(messages.UnpinPrefix, prefix_id=name)))


def _without_tenant(prefix: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in prefix.items() if name != "tenant"}


async def _cache(service: Service, request: Request) -> Response:
    return _json(await service.engine.ask(messages.ReadCache))


async def _cache_events(service: Service, request: Request) -> Response:
    watcher = f"watcher-{secrets.token_hex(8)}"
    engine, reader = service.engine, request.state.tenant if service.has_keys else None

    def start() -> None:
        engine.send(messages.Watch(watcher, reader))

    def stop() -> None:
        engine.send(messages.Unwatch(watcher))

    def encode(changed: Any) -> bytes:
        return b"data: " + msgspec.json.encode(changed) + b"\n\n"

    return _listening(service, request.state.tenant, watcher, start, stop, encode)


async def _open_session(service: Service, request: Request) -> Response:
    """Stream events to a chat app. The first lines are the session's name and the model's facts."""
    session, tenant, engine = f"s{secrets.token_hex(8)}", request.state.tenant, service.engine
    reader = tenant if service.has_keys else None

    def tell(line: bytes) -> None:
        if (listener := engine.listeners.get(session)) is not None:
            listener(line)

    questions = Questions(session, tenant, engine, service.queue, tell)

    def start() -> None:
        service.sessions[session] = questions
        engine.answered[session] = questions.end
        engine.send(messages.OpenSession(session, tenant, reader, _salt(service, tenant)))

    def stop() -> None:
        service.sessions.pop(session, None)
        engine.answered.pop(session, None)
        questions.close()
        engine.send(messages.CloseSession(session))

    first = msgspec.json.encode({"session": session}) + b"\n" + msgspec.json.encode(service.facts.facts) + b"\n"
    media_type = "application/x-ndjson"
    return _listening(service, tenant, session, start, stop, bytes, first, ping=b"\n", media_type=media_type)


async def _session_command(service: Service, request: Request) -> Response:
    session = request.path_params["name"]
    questions = service.sessions.get(session)
    if questions is None or questions.tenant != request.state.tenant:
        raise HTTPException(404, "there is no such session")
    try:
        for line in request.state.body.splitlines():
            questions.take(line)
    except Full as full:
        raise HTTPException(429, str(full), {"retry-after": str(full.retry_after)}) from None
    return _json({})


def _listening(
    service: Service,
    tenant: str,
    name: str,
    start: Callable[[], object],
    stop: Callable[[], object],
    encode: Callable[[Any], bytes],
    first: bytes = b"",
    *,
    ping: bytes = b": alive\n\n",
    media_type: str = "text/event-stream",
) -> Response:
    """Return a stream of the events that the engine sends to ``name``. A listener that does not read loses it."""
    engine, free = service.engine, _MOST_WATCHERS - service.watchers.total()
    if free <= 0 or (service.shared and not leaves_some(service.watchers[tenant], 1, free)):
        raise HTTPException(429, "too many streams of events are open; close one of them, or try again later")
    waiting: asyncio.Queue[Any] = asyncio.Queue(_MOST_UNREAD)
    lost = asyncio.Event()

    def listen(event: Any) -> None:
        if event is None or waiting.full():
            lost.set()
        else:
            waiting.put_nowait(event)

    async def events() -> AsyncIterator[bytes]:
        engine.listeners[name] = listen
        service.watchers[tenant] += 1
        start()
        ends = [asyncio.create_task(end.wait()) for end in (lost, service.closing, engine.ended)]
        coming = asyncio.create_task(waiting.get())
        try:
            if first:
                yield first
            while True:
                await asyncio.wait([coming, *ends], timeout=_PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if any(end.done() for end in ends):
                    return
                if coming.done():
                    yield encode(coming.result())
                    coming = asyncio.create_task(waiting.get())
                else:
                    yield ping
        finally:
            for task in (coming, *ends):
                task.cancel()
            engine.listeners.pop(name, None)
            service.watchers[tenant] -= 1
            stop()

    return StreamingResponse(events(), media_type=media_type, headers={"cache-control": "no-cache"})


async def _openapi(service: Service, request: Request) -> Response:
    return _json(document())
