"""Fields of requests at their bounds, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minillm.server import bodies
from minillm.server.bodies import BadField, ChatBody, CompletionBody, read_body
from minillm.service import prepare
from minillm.service.prepare import with_arguments

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def check(kind: Any, **fields: Any) -> None:
    """Read a body and check all of it that needs no engine."""
    body = read_body(kind, json.dumps({**(CHAT if kind is ChatBody else {"prompt": "a"}), **fields}).encode())
    body.check()
    body.params()
    if isinstance(body, CompletionBody):
        body.prompts()


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("n", [1, 64], [0, 65, -1]),
        ("beam_width", [1, 64], [0, 65]),
        ("priority", [1 - 2**31, 2**31 - 1], [-(2**31), 2**31]),
        ("cache_salt", ["x", "x" * 256], ["", "x" * 257]),
        ("allowed_token_ids", [[1], [1, 2, 3], [1, 2, 3, 1]], [[1, 2, 3, 4]]),
        ("store", [False, None], [True]),
    ],
)
def test_common_fields_have_their_bounds(
    kind: Any, field: str, allowed: list[Any], refused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_ALLOWED", 3)
    for value in allowed:
        check(kind, **{field: value})
    for value in refused:
        with pytest.raises(BadField) as caught:
            check(kind, **{field: value})
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("prompt", [["a"] * 256, "a", [1] * 300], [["a"] * 257, "", []]),
        ("logprobs", [0, 20], [-1, 21]),
        ("best_of", [1, 64], [0, 65]),
        ("suffix", ["", None], ["x"]),
    ],
)
def test_fields_of_completions_have_their_bounds(
    field: str, allowed: list[Any], refused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    test_common_fields_have_their_bounds(CompletionBody, field, allowed, refused, monkeypatch)


def test_top_logprobs_have_their_bounds() -> None:
    for count in (0, 20):
        check(ChatBody, logprobs=True, top_logprobs=count)
    for more in ({"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}, {"top_logprobs": 1}):
        with pytest.raises(BadField) as caught:
            check(ChatBody, **more)
        assert caught.value.field == "top_logprobs"


@pytest.mark.parametrize(
    ("kind", "field", "fields"),
    [
        (CompletionBody, "no_repeat_ngram_size", {"n": 2, "no_repeat_ngram_size": -1}),
        (CompletionBody, "stop_token_ids", {"stop": ["a"], "stop_token_ids": [-1]}),
        (ChatBody, "max_tokens", {"max_tokens": -2}),
        (ChatBody, "max_completion_tokens", {"max_completion_tokens": -2}),
        (ChatBody, "regex", {"structured_outputs": {"json": {}}, "regex": "a"}),
    ],
)
def test_errors_name_the_field_that_was_sent(kind: Any, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadField) as caught:
        check(kind, **fields)
    assert caught.value.field == field
    given = "structured_outputs.json and regex: " if "structured_outputs" in fields else field
    assert str(caught.value).startswith(given)


@pytest.mark.parametrize(
    ("kind", "field"),
    [(ChatBody, "max_tokens"), (ChatBody, "max_completion_tokens"), (CompletionBody, "max_tokens")],
)
def test_minus_one_is_no_limit_also_where_the_model_has_one(kind: Any, field: str) -> None:
    for value, expected in ((-1, {}), (7, {"max_tokens": 7})):
        body = read_body(kind, json.dumps({field: value}).encode())
        assert body.params({"max_tokens": 99}) == body.params() == expected


def test_both_names_of_the_limit_may_have_one_value() -> None:
    """Load generators give both. Different values are an error."""
    check(ChatBody, max_tokens=7, max_completion_tokens=7)
    with pytest.raises(BadField, match="max_tokens and max_completion_tokens mean the same, but differ"):
        check(ChatBody, max_tokens=7, max_completion_tokens=8)


def test_the_schema_of_a_tool_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object"}
    for room, fits in ((0, True), (1, True), (-1, False)):
        monkeypatch.setattr(prepare, "MAX_BYTES", len(json.dumps(schema)) + room)
        if fits:
            assert "arguments_0: %json" in with_arguments("start: arguments_0", {"f": schema})
        else:
            with pytest.raises(Exception, match="f: the JSON schema has more than"):
                with_arguments("start: arguments_0", {"f": schema})
