"""Test the bodies of answers without a server: completions, fields and log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from minillm.server.answers import text_logprobs
from minillm.server.client import Answer
from minillm.server.completions.formatters import ChatFormatter, TextFormatter
from minillm.server.parsers.parts import PlainReader
from minillm.service.call_messages import Began, Completion, Ended, Text, Token


def answer(began: Began | None = None) -> Answer:
    return Answer("x", began=began, ended=Ended("x", 3, 0), news=asyncio.Event())


def test_the_token_itself_is_among_the_most_probable() -> None:
    """As in OpenAI's API, the chosen token is always listed, so the list may have one token more than requested."""
    top = [("a", b"a", -0.1), ("b", b"b", -2.5)]
    drawn, best, first = Token(3, "c", b"c", -4.0, top), Token(1, "a", b"a", -0.1, top), Token(9, "start", b"", None)
    found = text_logprobs([first, drawn, best], 7)
    assert found["top_logprobs"] == [None, {"a": -0.1, "b": -2.5, "c": -4.0}, {"a": -0.1, "b": -2.5}]
    assert found["text_offset"] == [7, 12, 13]
    assert found["token_logprobs"] == [None, -4.0, -0.1]


@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_of_a_stream_and_of_the_whole_have_the_same_offsets(echo: bool) -> None:
    prompt = [Token(5, "so ", b"so ", None), Token(6, "it ", b"it ", -1.0)]
    tokens = [Token(7, "is", b"is", -0.5), Token(8, "!", b"!", -0.25)]
    one = answer(Began("x", "so it ", prompt, False, 2))
    [whole] = TextFormatter(1, echo, True).whole(0, [Completion(0, "is!", 2, tokens, "stop")], one)
    streamed = TextFormatter(1, echo, True)
    pieces = [piece for piece in [streamed.first(0, 0, one)] if piece is not None]
    for token in tokens:
        pieces += streamed.pieces(0, Text("x", 0, token.text, 1, [token]))
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == ("so it is!" if echo else "is!")
    for name, values in whole["logprobs"].items():
        assert [value for piece in pieces for value in piece["logprobs"][name]] == values
    assert whole["logprobs"]["text_offset"] == ([0, 3, 6, 8] if echo else [0, 2])


@pytest.mark.parametrize("ids", [[], [5, 6, 7]])
@pytest.mark.parametrize(
    "make", [lambda: ChatFormatter(False, lambda answer: PlainReader()), lambda: TextFormatter(1, False, False)]
)
def test_ids_of_the_prompt_are_told_where_they_are_known(make: Callable[[], Any], ids: list[int]) -> None:
    for began in (Began("x", "", [], False, 3, ids), None):
        form, one = make(), answer(began)
        body = {**form.whole(0, [Completion(0, "a", 1, [], "stop")], one)[0], **form.prompt([one])}
        assert body.get("prompt_token_ids") == (ids if ids and began is not None else None)
        assert ("prompt_token_ids" in body) == (bool(ids) and began is not None)


@pytest.mark.parametrize(
    "make", [lambda: ChatFormatter(False, lambda answer: PlainReader()), lambda: TextFormatter(1, False, False)]
)
def test_a_stream_has_the_fields_that_the_protocol_lacks(make: Callable[[], Any]) -> None:
    form, one = make(), answer()
    form.first(0, 0, one)
    [*_, last] = form.pieces(0, Text("x", 0, "a", 1, [], "stop", "END", [7]))
    assert (last["stop_reason"], last["token_ids"]) == ("END", [7])
    beam = Completion(0, "a", 1, [], "stop", 5, -3.0, -1.5)
    names = ("stop_reason", "score", "cumulative_logprob")
    form.first(0, 0, one)
    for choice in (form.pieces(0, beam)[-1], *form.whole(0, [beam], one)):
        assert [choice[name] for name in names] == [5, -1.5, -3.0]
    form.first(0, 0, one)
    assert not form.pieces(0, Text("x", 0, "a", 1))[0].keys() & set(names)
