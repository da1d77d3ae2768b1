"""The conversation as a tree, and reasoning in a stream, without any widget."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from minillm.errors import UsageError
from minillm.ui.chat.candidates import num_common
from minillm.ui.chat.conversation import Candidate, Conversation, Turn
from minillm.ui.chat.export import to_markdown
from minillm.ui.chat.saved import from_data, to_data
from minillm.ui.chat.sessions import SessionStore


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
    assert names == ["turn 1", "turn 2", "turn 2 · answer 2"]
    assert conversation.name_of("another-1") is None


def test_a_withdrawn_branch_shows_the_one_beside_it() -> None:
    conversation = Conversation()
    first = said(conversation, "a", "A")
    said(conversation, "b", "B")
    conversation.ask("a2", instead_of=first)
    assert conversation.withdraw() == "a2"
    assert shown(conversation) == ["a", "b"]


def test_a_withdrawn_branch_shows_the_one_that_was_visible() -> None:
    conversation = Conversation()
    first = said(conversation, "a", "A")
    conversation.ask("a2", instead_of=first)
    conversation.switch(first, 0)
    conversation.ask("a3", instead_of=first)
    assert conversation.withdraw() == "a3"
    assert shown(conversation) == ["a"]


def test_the_oldest_half_is_dropped_from_what_the_model_is_told() -> None:
    conversation = Conversation()
    for number in range(6):
        said(conversation, str(number), "x")
    conversation.ask("now")
    assert conversation.drop_oldest_half()
    assert [m["content"] for m in conversation.messages("s")] == ["s", "4", "x", "5", "x", "now"], "7 of 15 characters"
    assert conversation.drop_oldest_half()
    assert [m["content"] for m in conversation.messages("s")] == ["s", "now"]
    assert not conversation.drop_oldest_half(), "the question itself stays"
    assert len(conversation.turns) == 7


def test_no_more_than_half_is_dropped_of_turns_of_the_same_length() -> None:
    conversation = Conversation()
    for number in range(4):
        said(conversation, str(number), "x")
    assert conversation.drop_oldest_half()
    assert conversation.num_dropped == 2


def test_turns_without_words_are_dropped_too() -> None:
    conversation = Conversation()
    said(conversation, "", "")
    conversation.ask("")
    assert conversation.drop_oldest_half()
    assert conversation.num_dropped == 1


def with_candidates(conversation: Conversation) -> Turn:
    answer = conversation.ask("q")
    answer.candidates = [Candidate("one", 1, "stop"), Candidate("two", 2, "length"), Candidate("", 0, "abort")]
    answer.finish_reason = "abort"
    assert conversation.leaf is not None
    return conversation.leaf


def test_an_accepted_candidate_is_the_answer_and_the_others_are_branches() -> None:
    conversation = Conversation()
    turn = with_candidates(conversation)
    conversation.accept(turn, 1)
    answer = turn.answer
    assert (answer.text, answer.num_output_tokens, answer.candidates, answer.finish_reason) == ("two", 2, [], "length")
    assert conversation.leaf is turn
    texts = [(each.question, each.answer.text, each.answer.finish_reason) for each in conversation.siblings(turn)]
    assert texts == [("q", "one", "stop"), ("q", "two", "length")], "the third said nothing"
    assert len({each.answer.request_id for each in conversation.siblings(turn)}) == 2


def test_a_choice_can_be_undone_until_something_was_said_after_it() -> None:
    conversation = Conversation()
    turn = with_candidates(conversation)
    before = copy.deepcopy(turn.answer)
    conversation.accept(turn, 0)
    assert conversation.undo() is turn
    assert (turn.answer, conversation.siblings(turn), conversation.leaf) == (before, [turn], turn)
    conversation.accept(turn, 0)
    conversation.switch(turn, 1)
    conversation.ask("on the other branch")
    with pytest.raises(UsageError, match="no choice to undo"):
        conversation.undo()
    assert turn.answer.text == "one"


def test_candidates_survive_the_disk_and_are_exported_and_found(tmp_path: Path) -> None:
    conversation = Conversation()
    with_candidates(conversation)
    store = SessionStore(tmp_path)
    store.save(conversation)
    again = store.load(store.path_of(conversation))
    assert again.leaf is not None
    assert [(each.text, each.num_tokens, each.finish_reason) for each in again.leaf.answer.candidates] == [
        ("one", 1, "stop"), ("two", 2, "length"), ("", 0, "abort")
    ]  # fmt: skip
    assert [each.title for each in store.list("two")] == ["q"]
    assert "candidate 2 of 3\n\ntwo" in to_markdown(again)
    data = to_data(conversation)
    data["turns"][0]["answer"]["candidates"][0]["text"] = 5
    with pytest.raises(ValueError, match="text"):
        from_data(data)


def test_a_conversation_survives_the_disk() -> None:
    conversation = Conversation(system="brief", model="m")
    said(conversation, "a\n\x1b[31m", "A\u2028")
    second = said(conversation, "b", "B")
    conversation.ask("b2", instead_of=second).text = "half an ans"
    again = from_data(json.loads(json.dumps(to_data(conversation))))
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
        from_data(data)


def test_the_common_beginning_ends_with_a_word() -> None:
    texts = ["The quick brown fox jumps over", "The quick brown fox jumped high", "The quick brown fox jumps o"]
    assert texts[0][: num_common(texts)] == "The quick brown fox "
    assert num_common(["short", "short"]) == num_common(["The quick brown fox jumps over"]) == 0
    assert num_common(["The quick brown fox jumps over"] * 2) == 30
    assert num_common(["", "The quick brown fox jumps over"]) == 0
