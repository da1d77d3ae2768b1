"""The HTTP routes of OpenAI's Responses API. A request is converted to a chat request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minillm.checks import shown
from minillm.errors import UsageError
from minillm.server.answers import Json
from minillm.server.bodies import BadField, read_body
from minillm.server.completions.routes import ChatCall, chat_call, count_prompt_tokens
from minillm.server.http.sending import HTTPError
from minillm.server.responses.answers import Keep, ResponseWriter
from minillm.server.responses.bodies import NAMES, NoBody, ResponseBody, messages_of
from minillm.server.responses.store import Stored
from minillm.server.service import Service, json_response
from minillm.service import call_messages as messages

# Fields of a request that the response repeats.
_RETURNED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
    "safety_identifier", "top_logprobs", "user",
)  # fmt: skip


async def respond(service: Service, request: Request) -> ASGIApp:
    """Generate a response. With ``previous_response_id``, it continues the conversation of that response.

    Other requests can read and cancel the response while it runs.
    """
    body, tenant = read_body(ResponseBody, request.state.body), request.state.tenant
    name = f"resp_{secrets.token_hex(24)}"
    made, keep = _turn(service, tenant, name, body)
    made.call.wants_ids = body.store is not False
    writer = ResponseWriter(made.reader, _head(service, name, body, made.call.params), keep)
    response = made.response(service, writer, writer)

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        service.running[tenant, name] = writer
        try:
            await response(scope, receive, send)
        finally:
            del service.running[tenant, name]

    return run


async def count_input_tokens(service: Service, request: Request) -> Response:
    """Return the number of prompt tokens. `respond` would compute these tokens for the same request body."""
    made, _ = _turn(service, request.state.tenant, "", read_body(ResponseBody, request.state.body))
    count = await count_prompt_tokens(service, made.call)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def read_response(service: Service, request: Request) -> Response:
    """Return a response that is stored or running."""
    if request.query_params.get("stream", "false") != "false":
        raise BadField("stream: a stored response cannot be streamed again; leave it out", "stream")
    return _response(service, request.state.tenant, request.path_params["name"])


async def delete_response(service: Service, request: Request) -> Response:
    """Delete a stored response."""
    name = request.path_params["name"]
    if not service.responses.delete(request.state.tenant, name):
        raise HTTPError(404, f"Response with id {shown(name)} not found")
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(service: Service, request: Request) -> Response:
    """Cancel a running response and return it. Return a finished response unchanged."""
    read_body(NoBody, request.state.body or b"{}")
    name, tenant = request.path_params["name"], request.state.tenant
    writer = service.running.get((tenant, name))
    if writer is not None and writer.answer is not None and writer.answer.ended is None:
        answer, began, writer.is_cancelled = writer.answer, writer.answer.began, True
        service.engine.leave(answer)
        answer.ended = messages.Ended(answer.request_id, 0 if began is None else began.num_prompt_tokens, 0)
        answer.news.set()
    return _response(service, tenant, name)


def _turn(service: Service, tenant: str, name: str, body: ResponseBody) -> tuple[ChatCall, Keep]:
    """Return the engine's call for a request, and the function that stores the finished response.

    Raises BadField, or HTTPError if the model or the earlier response is unknown.
    """
    body.check()
    before: Stored | None = None
    if (previous := body.previous_response_id) is not None:
        before = _stored(service, tenant, previous, "previous_response_id", "previous_response_not_found")
    history: list[Json] = [] if before is None else msgspec.json.decode(before.messages)
    if body.input is None and before is None:
        raise BadField("input is missing", "input")
    conversation = [*history, *messages_of(body.input or [], partial(service.responses.item, tenant))]
    made = chat_call(service, tenant, name, body.chat(conversation), NAMES)
    prompt = made.call.prompt
    assert isinstance(prompt, messages.Conversation)
    key = msgspec.json.encode([body.instructions or "", prompt.tools, prompt.template_options])
    if before is not None and before.key == key:
        prompt.known_ids = before.token_ids.tolist()
        prompt.num_known = len(prompt.messages) - len(conversation) + len(history)

    def keep(response: Json, token_ids: Sequence[int]) -> None:
        answer = messages_of(response["output"]) or [{"role": "assistant", "content": ""}]
        service.responses.put(tenant, name, Stored.of(response, [*conversation, *answer], key, token_ids))

    return made, keep


def _response(service: Service, tenant: str, name: str) -> Response:
    """Return a response that is stored or running. Raises HTTPError for an unknown id."""
    writer = service.running.get((tenant, name))
    if writer is not None and service.responses.get(tenant, name) is None:
        return json_response(writer.now("cancelled" if writer.is_cancelled else "in_progress"))
    return Response(_stored(service, tenant, name).response, media_type="application/json")


def _stored(service: Service, tenant: str, name: str, field: str = "", code: str | None = None) -> Stored:
    """Return a stored response. Raises HTTPError if the tenant has none with this id."""
    found = service.responses.get(tenant, name)
    if found is None:
        why = f"Response with id {shown(name)} not found: it has expired, or was never stored"
        raise HTTPError(404, why, field=field, code=code)
    return found


def _head(service: Service, name: str, body: ResponseBody, params: Json) -> Json:
    """Return the response's fields that follow from the request, such as ``model``.

    Raises UsageError if a field is nested too deep.
    """
    given = msgspec.to_builtins
    head: dict[str, Any] = {
        **{each: getattr(body, each) for each in _RETURNED},
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": service.names[0],
        "background": False,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None} | given(body.reasoning or {}),
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.get("temperature", 1.0),
        "text": {"format": {"type": "text"}} | given(body.text or {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": params.get("top_p", 1.0),
        "truncation": "disabled",
    }
    try:
        msgspec.json.encode(head)
    except RecursionError:
        raise UsageError("values are nested too deep; send flatter ones") from None
    return head
