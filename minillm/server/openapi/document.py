"""The OpenAPI document, https://spec.openapis.org/oas/v3.1.0. It is generated from the types of the bodies."""

from functools import cache
from typing import Any

import msgspec

import minillm
from minillm.server import bodies
from minillm.server.anthropic.answers import is_messages
from minillm.server.http.access import OPEN_PATHS
from minillm.server.openapi.answers import ROUTES, SCHEMAS
from minillm.server.responses.bodies import NoBody, ResponseBody

_ERRORS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 501, 503)
# Each of these bodies needs at least one of the listed fields. The types of the bodies cannot express that.
_NEEDED: dict[Any, tuple[str, ...]] = {
    bodies.ChatBody: ("messages", "fork_of"),
    bodies.CompletionBody: ("prompt", "fork_of"),
    ResponseBody: ("input", "previous_response_id"),
    bodies.TokenizeBody: ("prompt", "messages"),
    bodies.PrefixBody: ("prompt", "messages"),
}
_NULL = {"type": "null"}


@cache
def document(*, has_keys: bool = False) -> dict[str, Any]:
    """Return the OpenAPI document as a dictionary that is encoded as JSON.

    With ``has_keys``, all routes require an API key, except for the routes that are always open.
    """
    kinds = list(dict.fromkeys(kind for _, _, _, kind, _ in ROUTES if kind is not None))
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    of_kind = dict(zip(kinds, refs, strict=True))
    for kind in kinds:
        _allow_nulls(components[kind.__name__])
    for needing, names in _NEEDED.items():
        given = [{"required": [name], "properties": {name: {"not": _NULL}}} for name in names]
        components[needing.__name__]["anyOf"] = given
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, kind, schemas in ROUTES:
        answers = {media_type: {"schema": schema} for media_type, schema in schemas.items()}
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
            entry["requestBody"] = {"required": kind is not NoBody, "content": content}
        if "{name}" in path:
            entry["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[method] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "minillm", "version": minillm.__version__},
        "paths": paths,
        "components": {
            "schemas": {**components, **SCHEMAS},
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
