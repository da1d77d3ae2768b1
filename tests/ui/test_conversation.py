"""The conversation as a tree, and reasoning in a stream, without any widget."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.ui.chat.conversation import Candidate, Conversation, Turn
from minillm.ui.chat.transcript import ReasoningSplitter, split_reasoning


def said(conversation: Conversation, question: str, text: str) -> Turn:
    answer = conversation.ask(question)
    answer.text, answer.finish_reason = text, "stop"
    assert conversation.leaf is not None
    return conversation.leaf


def shown(conversation: Conversation) -> list[str]:
    return [turn.question for turn in conversation.turns]


def test_an_edited_question_is_a_branch_and_nothing_is_lost() -> None:
    conversation = Conversation()
    first = said(conversation, "a", "A")
    second = said(conversation, "b", "B")
    said(conversation, "c", "C")
    conversation.ask("b2", instead_of=second).finish_reason = "stop"
    assert shown(conversation) == ["a", "b2"]
    assert [turn.question for turn in conversation.siblings(second)] == ["b", "b2"]
    conversation.switch(conversation.turns[1], 1)
    assert shown(conversation) == ["a", "b", "c"], "round the corner, and down to the latest turn"
    conversation.switch(second, -1)
    assert shown(conversation) == ["a", "b2"]
    conversation.ask("a2", instead_of=first).finish_reason = "stop"
    assert shown(conversation) == ["a2"]
    assert [turn.question for turn in conversation.all_turns()] == ["a", "b", "c", "b2", "a2"]


def test_turns_have_names() -> None:
    conversation = Conversation()
    said(conversation, "a", "A")
    second = said(conversation, "b", "B")
    conversation.ask("b2", instead_of=second)
    names = [conversation.name_of(turn.answer.request_id) for turn in conversation.all_turns()]
    assert names == ["turn 1", "turn 2", "turn 2b"]
    assert conversation.name_of("another-1") is None


def test_a_withdrawn_branch_shows_the_one_beside_it() -> None:
    conversation = Conversation()
    first = said(conversation, "a", "A")
    said(conversation, "b", "B")
    conversation.ask("a2", instead_of=first)
    assert conversation.withdraw() == "a2"
    assert shown(conversation) == ["a", "b"]


def test_the_oldest_turns_are_dropped_from_what_the_model_is_told() -> None:
    conversation = Conversation()
    for number in range(3):
        said(conversation, str(number), "x")
    conversation.ask("now")
    assert conversation.drop_oldest()
    assert conversation.drop_oldest()
    assert [m["content"] for m in conversation.messages("s")] == ["s", "2", "x", "now"]
    assert conversation.drop_oldest()
    assert not conversation.drop_oldest(), "the question itself stays"
    assert len(conversation.turns) == 4


def test_an_accepted_candidate_is_the_answer() -> None:
    conversation = Conversation()
    answer = conversation.ask("q")
    answer.candidates = [Candidate("one", 1), Candidate("two", 2)]
    answer.accept(1)
    assert (answer.text, answer.num_output_tokens, answer.candidates) == ("two", 2, [])


def test_a_conversation_survives_the_disk() -> None:
    conversation = Conversation(system="brief", model="m")
    said(conversation, "a\n\x1b[31m", "A\u2028")
    second = said(conversation, "b", "B")
    conversation.ask("b2", instead_of=second).text = "half an ans"
    again = Conversation.from_data(json.loads(json.dumps(conversation.to_data())))
    assert [t.question for t in again.all_turns()] == [t.question for t in conversation.all_turns()]
    assert shown(again) == shown(conversation)
    assert again.turns[-1].answer.finish_reason == "lost", "it was open: the app ended meanwhile"
    assert again.turns[-1].answer.text == "half an ans"
    assert (again.system, again.model, again.conversation_id) == ("brief", "m", conversation.conversation_id)


@pytest.mark.parametrize(
    "data",
    [{}, [], {"id": "x"}, {"id": "x", "system": "", "model": "", "began": 0, "leaf": 5, "turns": []},
     {"id": "x", "system": "", "model": "", "began": 0, "leaf": None, "turns": [{"parent": 9, "question": "q"}]}],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="not a conversation"):
        Conversation.from_data(data)  # type: ignore[arg-type]


def test_reasoning_is_split_off() -> None:
    assert split_reasoning("<think>hm</think>yes") == ("hm", "yes")
    assert split_reasoning("hm</think>yes", inside=True) == ("hm", "yes")
    assert split_reasoning("a <b> c</think> d") == ("", "a <b> c</think> d")
    assert split_reasoning("<think>never closed") == ("never closed", "")
    assert split_reasoning("ends with <thi") == ("", "ends with <thi")


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "thin", "k>", "/", "x"]), max_size=12), st.data())
def test_reasoning_does_not_depend_on_how_the_text_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    splitter = ReasoningSplitter()
    pieces: list[tuple[bool, str]] = []
    while text:
        cut = data.draw(st.integers(1, len(text)))
        pieces += splitter.push(text[:cut])
        text = text[cut:]
    pieces += splitter.finish()
    whole = split_reasoning("".join(parts))
    assert ("".join(t for inside, t in pieces if inside), "".join(t for inside, t in pieces if not inside)) == whole
