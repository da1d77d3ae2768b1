"""Search in a conversation's data instead of its widgets, so that turns without widgets are found as well."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from minillm.text.reasoning import ReasoningSplitter
from minillm.text.safe import clean
from minillm.ui.chat.candidates import common_line, shown_texts
from minillm.ui.chat.conversation import Answer, Turn
from minillm.ui.chat.files import folded_files
from minillm.ui.chat.turn_view import shown_question


@dataclass(frozen=True)
class FoundPlace:
    """The place of a match: the turn, and the match's number within the turn, counted over all its texts."""

    turn: Turn
    number: int


@dataclass
class Finder:
    """Finds words in turns.

    The texts of turns are cached, because computing them takes a while in a long conversation.
    """

    _texts: WeakKeyDictionary[Turn, tuple[object, list[str]]] = field(default_factory=WeakKeyDictionary)

    def find(self, turns: Sequence[Turn], words: str) -> list[FoundPlace]:
        """Return all matches of ``words`` in questions and answers, from top to bottom. Case is ignored."""
        if not words:
            return []
        pattern, found = pattern_of(words), []
        for turn in turns:
            count = sum(1 for text in self._texts_of(turn) for _ in pattern.finditer(text))
            found += [FoundPlace(turn, number) for number in range(count)]
        return found

    def _texts_of(self, turn: Turn) -> list[str]:
        answer = turn.answer
        version = len(answer.text), tuple((each.text, each.finish_reason) for each in answer.candidates)
        known = self._texts.get(turn)
        if known is None or known[0] != version:
            known = self._texts[turn] = version, texts_of(turn)
        return known[1]


def pattern_of(words: str) -> re.Pattern[str]:
    """Return a pattern that matches ``words`` literally, ignoring case."""
    return re.compile(re.escape(words), re.IGNORECASE)


def texts_of(turn: Turn) -> list[str]:
    """Return the texts of a turn as displayed, from top to bottom, without Markdown syntax.

    The texts of the turn's files, which are folded on the screen, come last.
    """
    question, answer = shown_question(turn.question), turn.answer
    files = folded_files(clean(turn.question))[1].values()
    if answer.candidates:
        common, texts = shown_texts(answer.candidates, answer.in_reasoning)
        cards = [text[len(common) :] for text, same_as in texts if same_as is None]
        return [question, common_line(common), *cards, *files]
    return [question, *_answer_texts(turn.answer), *files]


def _answer_texts(answer: Answer) -> list[str]:
    # Imported here, because the first screen has no Markdown, and importing takes a tenth of the time until then.
    from minillm.ui.chat.markdown import plain_texts

    splitter = ReasoningSplitter(answer.in_reasoning)
    parts: list[tuple[bool, str]] = []
    for reasoning, text in [*splitter.push(answer.text), *splitter.finish()]:
        if parts and parts[-1][0] == reasoning:
            parts[-1] = reasoning, parts[-1][1] + text
        elif text.strip():
            parts.append((reasoning, text.lstrip()))
    return [text for _, part in parts for text in plain_texts(part)]
