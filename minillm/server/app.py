"""The HTTP application: the table of routes, and the routes without a stream."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import minillm
from minillm.checks import shown
from minillm.errors import ContextLengthError, MinillmError, UsageError
from minillm.server import bodies
from minillm.server.anthropic.answers import error_at
from minillm.server.anthropic.routes import count_tokens, create_message
from minillm.server.bodies import BadField
from minillm.server.client import EngineDied
from minillm.server.completions.routes import chat, complete
from minillm.server.http.access import Access
from minillm.server.http.rules import AccessRules
from minillm.server.http.sending import CONTEXT_LENGTH, HTTPError
from minillm.server.openapi.document import document
from minillm.server.parsers.tool_choice import shown_tools
from minillm.server.responses.routes import (
    cancel_response,
    count_input_tokens,
    delete_response,
    read_response,
    respond,
)
from minillm.server.service import Service, json_response
from minillm.server.sessions.routes import open_session, take_session_commands, watch_cache
from minillm.service import call_messages as messages

_MOST_TOKENS = 1 << 17  # maximum number of ids to decode in one request, unless the context is longer


Handler = tuple[str, str, Callable[[Service, Request], Awaitable[Any]]]  # method, path, and function


def make_app(service: Service, rules: AccessRules) -> ASGIApp:
    """Return the ASGI application: the access rules, then all routes."""
    generating: list[Handler] = [
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", complete),
        ("POST", "/v1/messages", create_message),
        ("POST", "/v1/responses", respond),
    ]
    others: list[Handler] = [
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:path}", _model),
        ("GET", "/health", _health),
        ("GET", "/version", _version),
        ("GET", "/metrics", _metrics),
        ("POST", "/v1/messages/count_tokens", count_tokens),
        ("POST", "/v1/responses/input_tokens", count_input_tokens),
        ("GET", "/v1/responses/{name}", read_response),
        ("DELETE", "/v1/responses/{name}", delete_response),
        ("POST", "/v1/responses/{name}/cancel", cancel_response),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/v1/prefixes", _list_prefixes),
        ("POST", "/v1/prefixes", _pin),
        ("DELETE", "/v1/prefixes/{name}", _unpin),
        ("GET", "/v1/cache", _cache),
        ("GET", "/v1/cache/events", watch_cache),
        ("GET", "/v1/session", open_session),
        ("POST", "/v1/session/{name}", take_session_commands),
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
    """An ASGI layer that bypasses Starlette's router for the routes that generate text.

    Starlette tries one route after another, and wraps each route in several layers. This would delay the first token
    and every later chunk.
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
        response = await route.endpoint(request)
        await response(scope, receive, send)


def _endpoint(service: Service, handler: Callable[[Service, Request], Awaitable[Any]]) -> Any:
    async def endpoint(request: Request) -> Any:
        try:
            return await handler(service, request)
        except HTTPError as failed:
            return _error_response(request, failed)
        except MinillmError as error:
            status = 400 if isinstance(error, UsageError) else 503 if isinstance(error, EngineDied) else 500
            field = error.field if isinstance(error, BadField) else ""
            code = CONTEXT_LENGTH if isinstance(error, ContextLengthError) else None
            return _error_response(request, HTTPError(status, str(error), field=field, code=code))

    endpoint.__name__ = handler.__name__
    return endpoint


def _error_response(request: Request, failed: HTTPError) -> Response:
    answer = json_response(error_at(request.scope["path"], failed), failed.status)
    answer.raw_headers += failed.headers
    return answer


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _error_response(request, HTTPError(error.status_code, str(error.detail)))
    answer.headers.update(error.headers or {})
    if error.status_code == 405:
        answer.headers["allow"] = ", ".join(sorted(_methods(request)))
    return answer


def _methods(request: Request) -> set[str]:
    """Return the HTTP methods that are allowed for the request's path.

    Several routes may have the same path, with different methods. All their methods are returned.
    """
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found if route.path == found[0].path for method in route.methods or ()}


async def _on_defect(request: Request, error: Exception) -> Response:
    return _error_response(request, HTTPError(500, "internal error; see the server's log"))


# --- models, tokens, health -------------------------------------------------------------------------------------------


def _model_json(service: Service, name: str) -> dict[str, Any]:
    facts = service.facts
    owner = {"id": name, "object": "model", "created": int(service.began), "owned_by": "minillm"}
    return {**owner, "max_model_len": facts.max_model_len, "source": facts.source}


async def _models(service: Service, request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_json(service, name) for name in service.names]})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_model_json(service, name))


async def _health(service: Service, request: Request) -> Response:
    engine = service.engine
    done, total = engine.prepared
    health = {"status": engine.trouble or "ok", "warm_up": {"done": done, "total": total}}
    return json_response(health, 200 if engine.serves else 503)


async def _version(service: Service, request: Request) -> Response:
    return json_response({"version": minillm.__version__})


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _tokenize(service: Service, request: Request) -> Response:
    body = bodies.read_body(bodies.TokenizeBody, request.state.body)
    service.check_model(body.model)
    make = partial(
        messages.Tokenize,
        tenant=request.state.tenant,
        prompt=_prompt_of(body, add_generation_prompt=body.add_generation_prompt),
        add_special_tokens=body.add_special_tokens,
        parse_special=body.parse_special,
    )
    found = await service.engine.ask(make)
    ids = found["tokens"]
    value = {"tokens": ids, "count": len(ids), "max_model_len": service.facts.max_model_len}
    if body.return_token_strs:
        value["token_strs"] = found["texts"]
    return json_response(value)


def _prompt_of(body: bodies.TokenizeBody | bodies.PrefixBody, *, add_generation_prompt: bool) -> Any:
    """Return the prompt or the conversation of a body. Raises BadField unless the body has exactly one of them."""
    if (body.prompt is None) == (body.messages is None):
        raise BadField("give either prompt or messages", "prompt")
    if body.messages is None:
        return body.prompt
    return messages.Conversation(body.messages, add_generation_prompt, tools=shown_tools(body.tools))


async def _detokenize(service: Service, request: Request) -> Response:
    body = bodies.read_body(bodies.DetokenizeBody, request.state.body)
    service.check_model(body.model)
    most, end = max(_MOST_TOKENS, service.facts.max_model_len), service.facts.vocab_size
    if len(body.tokens) > most:
        raise BadField(f"tokens: {len(body.tokens)} ids; at most {most}, so send them in parts", "tokens")
    for token_id in body.tokens:
        if not 0 <= token_id < end:
            raise BadField(f"tokens: {token_id} is not from 0 to {end - 1}", "tokens")
    make = partial(messages.Detokenize, tenant=request.state.tenant, token_ids=body.tokens)
    return json_response({"prompt": await service.engine.ask(make)})


# --- prefixes and the pool --------------------------------------------------------------------------------------------


async def _list_prefixes(service: Service, request: Request) -> Response:
    own = [each for each in service.prefixes.values() if each["tenant"] == request.state.tenant]
    return json_response({"object": "list", "data": [_without_tenant(each) for each in own]})


async def _pin(service: Service, request: Request) -> Response:
    body = bodies.read_body(bodies.PrefixBody, request.state.body)
    prompt = _prompt_of(body, add_generation_prompt=False)
    if not prompt:
        raise BadField("prompt is empty; give at least one token", "prompt")
    tenant = request.state.tenant
    salt = service.salt(tenant, body.cache_salt)
    make = partial(messages.PinPrefix, tenant=tenant, prompt=prompt, salt=salt)
    found = {"object": "prefix", "created": int(time.time()), **await service.engine.ask(make)}
    service.prefixes[found["id"]] = {**found, "tenant": tenant}
    return json_response(found)


async def _unpin(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    prefix = service.prefixes.get(name)
    if prefix is None or prefix["tenant"] != request.state.tenant:
        raise HTTPError(404, f"there is no prefix {shown(name)}")
    found = await service.engine.ask(partial(messages.UnpinPrefix, prefix_id=name))
    service.prefixes.pop(name, None)  # after the engine has unpinned it; it stays listed if the engine does not respond
    return json_response(found)


def _without_tenant(prefix: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in prefix.items() if name != "tenant"}


async def _cache(service: Service, request: Request) -> Response:
    return json_response(await service.engine.ask(messages.ReadCache))


async def _openapi(service: Service, request: Request) -> Response:
    return json_response(document(has_keys=service.has_keys))
