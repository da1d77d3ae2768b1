"""The OpenAPI document, https://spec.openapis.org/oas/v3.1.0. It is generated from the types of the bodies."""

from functools import cache
from typing import Any

import msgspec

import minillm
from minillm.server import bodies
from minillm.server.anthropic.answers import is_messages
from minillm.server.anthropic.routes import MessagesBody
from minillm.server.http.access import OPEN_PATHS
from minillm.server.openapi import answers as openapi_answers
from minillm.server.responses import bodies as response_bodies

_ROUTES: tuple[tuple[str, str, str, Any], ...] = (
    ("post", "/v1/chat/completions", "Answer a conversation", bodies.ChatBody),
    ("post", "/v1/completions", "Complete prompts", bodies.CompletionBody),
    ("post", "/v1/messages", "Answer a conversation, as Anthropic's Messages API", MessagesBody),
    ("post", "/v1/messages/count_tokens", "Count the tokens of a conversation", MessagesBody),
    ("post", "/v1/responses", "Answer an input, or continue a response", response_bodies.ResponseBody),
    ("post", "/v1/responses/input_tokens", "Count the tokens of an input", response_bodies.ResponseBody),
    ("get", "/v1/responses/{name}", "Show a stored response", None),
    ("delete", "/v1/responses/{name}", "Delete a stored response", None),
    ("post", "/v1/responses/{name}/cancel", "End a running response", response_bodies.NoBody),
    ("get", "/v1/models", "List the served model", None),
    ("get", "/v1/models/{name}", "Describe the served model", None),
    ("get", "/health", "Check that the engine runs", None),
    ("get", "/version", "Show the version of minillm", None),
    ("get", "/metrics", "Export metrics for Prometheus", None),
    ("post", "/tokenize", "Convert text or a conversation to token ids", bodies.TokenizeBody),
    ("post", "/detokenize", "Convert token ids to text", bodies.DetokenizeBody),
    ("get", "/v1/prefixes", "List the pinned prefixes", None),
    ("post", "/v1/prefixes", "Compute a prefix and pin its blocks", bodies.PrefixBody),
    ("delete", "/v1/prefixes/{name}", "Unpin a prefix", None),
    ("get", "/v1/cache", "Show the block tables and figures of the pool", None),
    ("get", "/v1/cache/events", "Stream the changes in the pool", None),
)
_ERRORS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 501, 503)
# Each of these bodies needs at least one of the listed fields. The types of the bodies cannot express that.
_NEEDED: dict[Any, tuple[str, ...]] = {
    bodies.ChatBody: ("messages", "fork_of"),
    bodies.CompletionBody: ("prompt", "fork_of"),
    response_bodies.ResponseBody: ("input", "previous_response_id"),
    bodies.TokenizeBody: ("prompt", "messages"),
    bodies.PrefixBody: ("prompt", "messages"),
}
_NULL = {"type": "null"}


@cache
def document(*, has_keys: bool = False) -> dict[str, Any]:
    """Return the OpenAPI document as a dictionary that is encoded as JSON.

    With ``has_keys``, all routes require an API key, except for the routes that are always open.
    """
    kinds = list(dict.fromkeys(kind for *_, kind in _ROUTES if kind is not None))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    of_kind = dict(zip(kinds, schemas, strict=True))
    for kind in kinds:
        _allow_nulls(components[kind.__name__])
    for needing, names in _NEEDED.items():
        given = [{"required": [name], "properties": {name: {"not": _NULL}}} for name in names]
        components[needing.__name__]["anyOf"] = given
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, kind in _ROUTES:
        answers = {kind: {"schema": schema} for kind, schema in openapi_answers.ANSWERS[method, path].items()}
        shape = "MessageError" if is_messages(path) else "Error"
        error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
        entry: dict[str, Any] = {"summary": summary, "responses": {
            "200": {"description": "an answer", "content": answers},
            **{str(code): {"description": "an error", "content": error} for code in _ERRORS},
        }}  # fmt: skip
        if has_keys:
            headers = ("key", "x-api-key") if is_messages(path) else ("key",)
            entry["security"] = [] if path in OPEN_PATHS else [{header: []} for header in headers]
        if kind is not None:
            content = {"application/json": {"schema": of_kind[kind]}}
            entry["requestBody"] = {"required": kind is not response_bodies.NoBody, "content": content}
        if "{name}" in path:
            entry["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[method] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "minillm", "version": minillm.__version__},
        "paths": paths,
        "components": {
            "schemas": {**components, **openapi_answers.SCHEMAS},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _allow_nulls(schema: dict[str, Any]) -> None:
    """Allow null for each optional field of a body, and for unknown fields.

    The server treats a field that is null as absent.
    """
    properties = schema["properties"]
    for name in properties.keys() - schema["required"]:
        if _NULL not in properties[name].get("anyOf", ()):
            properties[name] = {"anyOf": [properties[name], _NULL]}
    schema["additionalProperties"] = _NULL
