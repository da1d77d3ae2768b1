"""The long conversation of `minillm bench ui`."""

from __future__ import annotations

from minillm.bench.ui import _LAST, _TURNS, _long_conversation
from minillm.ui.chat.saved import from_data, to_data


def test_the_long_conversation_is_a_saved_one_whose_end_is_told_by_a_word() -> None:
    conversation = from_data(to_data(_long_conversation()))
    turns = conversation.turns
    assert len(turns) == _TURNS
    assert [turn for turn in turns if _LAST in turn.question + turn.answer.text] == turns[-1:]
    assert all(not turn.answer.is_open for turn in turns)
