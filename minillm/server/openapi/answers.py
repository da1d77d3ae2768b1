"""The routes, with the types of their bodies and the JSON schemas of their responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from minillm.server import bodies
from minillm.server.answers import Json
from minillm.server.anthropic.routes import MessagesBody
from minillm.server.responses.bodies import NoBody, ResponseBody

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_INTEGER: Json = {"type": ["integer", "null"]}
_OBJECT: Json = {"type": "object"}
_REASON: Json = {"enum": ["stop", "length", "tool_calls", "abort", None]}
_IDS: Json = {"type": "array", "items": _COUNT}
_SCORES: Json = {"type": "array", "items": {"type": ["object", "null"]}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _record(*optional: str, **properties: Json) -> Json:
    """Return the schema of an object. All properties are required, except the ``optional`` ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_OWN = {"stop_reason": {"type": ["string", "integer"]}, "score": _NUMBER, "cumulative_logprob": _NUMBER}

# Fields of some output items.
_ITEM: dict[str, Json] = {
    "role": {"const": "assistant"},
    "content": _list(_OBJECT),
    "summary": {"const": []},
    "call_id": _TEXT,
    "name": _TEXT,
    "arguments": _TEXT,
}

# Named schemas, to which other schemas refer.
SCHEMAS: dict[str, Json] = {
    "Error": _record(
        error=_record(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT)),
    ),
    "MessageError": _record(
        type={"const": "error"},
        error=_record("details", message=_TEXT, type=_TEXT, details=_record(error_code=_TEXT)),
    ),
    "Usage": _record(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_record(cached_tokens=_COUNT),
        completion_tokens_details=_record(reasoning_tokens=_COUNT),
    ),
    "ChatChoice": _record(
        "token_ids",
        *_OWN,
        index=_COUNT,
        message=_record(
            "reasoning_content",
            "tool_calls",
            role={"const": "assistant"},
            content=_or_null(_TEXT),
            refusal={"type": "null"},
            reasoning_content=_TEXT,
            tool_calls=_list(
                _record(id=_TEXT, type={"const": "function"}, function=_record(name=_TEXT, arguments=_TEXT))
            ),
        ),
        logprobs={"type": ["object", "null"]},
        finish_reason=_REASON,
        token_ids=_IDS,
        **_OWN,
    ),
    "TextChoice": _record(
        "token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
        *_OWN,
        index=_COUNT,
        text=_TEXT,
        logprobs={"type": ["object", "null"]},
        finish_reason=_REASON,
        prompt_logprobs=_SCORES,
        prompt_token_ids=_IDS,
        token_ids=_IDS,
        **_OWN,
    ),
    "Response": _record(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        status={"enum": ["in_progress", "completed", "incomplete", "cancelled"]},
        output=_list(
            _record(
                *_ITEM,
                id=_TEXT,
                type={"enum": ["message", "reasoning", "function_call"]},
                status={"enum": ["completed", "incomplete"]},
                **_ITEM,
            )
        ),
        incomplete_details={"type": ["object", "null"]},
        usage=_or_null(
            _record(
                input_tokens=_COUNT,
                input_tokens_details=_record(cached_tokens=_COUNT),
                output_tokens=_COUNT,
                output_tokens_details=_record(reasoning_tokens=_COUNT),
                total_tokens=_COUNT,
            )
        ),
        previous_response_id=_or_null(_TEXT),
        store={"type": "boolean"},
        completed_at=_or_null(_COUNT),
        error={"type": "null"},
        background={"const": False},
        instructions=_or_null(_TEXT),
        max_output_tokens=_INTEGER,
        max_tool_calls=_INTEGER,
        metadata=_OBJECT,
        parallel_tool_calls={"type": "boolean"},
        prompt_cache_key=_or_null(_TEXT),
        reasoning=_OBJECT,
        safety_identifier=_or_null(_TEXT),
        service_tier={"const": "default"},
        temperature=_NUMBER,
        text=_OBJECT,
        tool_choice={"type": ["string", "object"]},
        tools=_list(_OBJECT),
        top_logprobs=_INTEGER,
        top_p=_NUMBER,
        truncation={"const": "disabled"},
        user=_or_null(_TEXT),
    ),
    "Model": _record(
        id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT, source=_TEXT
    ),
    "Prefix": _record(
        "replica", id=_TEXT, object={"const": "prefix"}, created=_COUNT, num_tokens=_COUNT, num_blocks=_COUNT,
        replica=_COUNT,
    ),
}  # fmt: skip


def _completion(kind: str, choice: str, **more: Json) -> Json:
    return _record(
        *more, id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=_list(_ref(choice)),
        usage=_ref("Usage"), **more,
    )  # fmt: skip


_BLOCK: Json = {
    "oneOf": [
        _record(type={"const": "text"}, text=_TEXT),
        _record(type={"const": "thinking"}, thinking=_TEXT, signature=_TEXT),
        _record(type={"const": "tool_use"}, id=_TEXT, name=_TEXT, input=_OBJECT),
    ]
}
_TABLE = _record("replica", seq_id=_COUNT, request=_TEXT, index=_COUNT, state=_TEXT, num_tokens=_COUNT, blocks=_IDS)

_MESSAGE = _record(
    id=_TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_TEXT,
    content=_list(_BLOCK),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence=_or_null(_TEXT),
    usage=_record(
        input_tokens=_COUNT,
        cache_creation_input_tokens=_COUNT,
        cache_read_input_tokens=_COUNT,
        output_tokens=_COUNT,
        output_tokens_details=_record(thinking_tokens=_COUNT),
    ),
)
_EVENTS: Json = {"text/event-stream": {}}


def _json(schema: Json) -> Json:
    return {"application/json": schema}


# Method, path, summary and type of the body of each route, and the content of its response by media type.
ROUTES: tuple[tuple[str, str, str, Any, Json], ...] = (
    ("post", "/v1/chat/completions", "Answer a conversation", bodies.ChatBody,
     _json(_completion("chat.completion", "ChatChoice", prompt_token_ids=_IDS, prompt_logprobs=_SCORES)) | _EVENTS),
    ("post", "/v1/completions", "Complete prompts", bodies.CompletionBody,
     _json(_completion("text_completion", "TextChoice")) | _EVENTS),
    ("post", "/v1/messages", "Answer a conversation, as Anthropic's Messages API", MessagesBody,
     _json(_MESSAGE) | _EVENTS),
    ("post", "/v1/messages/count_tokens", "Count the tokens of a conversation", MessagesBody,
     _json(_record(input_tokens=_COUNT))),
    ("post", "/v1/responses", "Answer an input, or continue a response", ResponseBody,
     _json(_ref("Response")) | _EVENTS),
    ("post", "/v1/responses/input_tokens", "Count the tokens of an input", ResponseBody,
     _json(_record(object={"const": "response.input_tokens"}, input_tokens=_COUNT))),
    ("get", "/v1/responses/{name}", "Show a stored response", None, _json(_ref("Response"))),
    ("delete", "/v1/responses/{name}", "Delete a stored response", None,
     _json(_record(id=_TEXT, object={"const": "response"}, deleted={"const": True}))),
    ("post", "/v1/responses/{name}/cancel", "End a running response", NoBody, _json(_ref("Response"))),
    ("get", "/v1/models", "List the served model", None,
     _json(_record(object={"const": "list"}, data=_list(_ref("Model"))))),
    ("get", "/v1/models/{name}", "Describe the served model", None, _json(_ref("Model"))),
    ("get", "/health", "Check that the engine runs", None,
     _json(_record(status=_TEXT, warm_up=_record(done=_COUNT, total=_COUNT)))),
    ("get", "/version", "Show the version of minillm", None, _json(_record(version=_TEXT))),
    ("get", "/metrics", "Export metrics for Prometheus", None, {"text/plain": _TEXT}),
    ("post", "/tokenize", "Convert text or a conversation to token ids", bodies.TokenizeBody,
     _json(_record("token_strs", tokens=_IDS, count=_COUNT, max_model_len=_COUNT, token_strs=_list(_TEXT)))),
    ("post", "/detokenize", "Convert token ids to text", bodies.DetokenizeBody, _json(_record(prompt=_TEXT))),
    ("get", "/v1/prefixes", "List the pinned prefixes", None,
     _json(_record(object={"const": "list"}, data=_list(_ref("Prefix"))))),
    ("post", "/v1/prefixes", "Compute a prefix and pin its blocks", bodies.PrefixBody, _json(_ref("Prefix"))),
    ("delete", "/v1/prefixes/{name}", "Unpin a prefix", None, _json(_record(id=_TEXT, deleted={"const": True}))),
    ("get", "/v1/cache", "Show the block tables and figures of the pool", None,
     _json(_record("cached_blocks", "replicas", figures=_OBJECT, tables=_list(_TABLE), cached_blocks=_IDS,
                   replicas=_list(_OBJECT)))),
    ("get", "/v1/cache/events", "Stream the changes in the pool", None, _EVENTS),
)  # fmt: skip
