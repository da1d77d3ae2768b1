"""Convert conversations to JSON data and back. Saved files are untrusted, so every field is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from minillm.checks import shown
from minillm.ui.chat.conversation import Answer, Candidate, Conversation, Turn

_UNSAVED = ("tokens", "candidates", "num_read_tokens", "reading_left")
_OF_ANSWER = tuple(item.name for item in fields(Answer) if item.name not in _UNSAVED)
_OF_CANDIDATE = tuple(item.name for item in fields(Candidate) if item.name not in _UNSAVED)
_LARGEST = 1 << 53  # numbers such as token counts must be below this
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # also used as a file name
_ENDINGS = (None, "stop", "length", "abort", "lost")


def to_data(conversation: Conversation) -> dict[str, Any]:
    """Convert a conversation to JSON data. The data's ``id`` is the file's id."""
    turns = list(conversation.all_turns())
    number = {id(turn): i for i, turn in enumerate(turns)}
    return {
        "id": conversation.file_id,
        "model": conversation.model,
        "system": conversation.system,
        "began": conversation.began,
        "title": conversation.title,
        "shortened": conversation.shortened,
        "leaf": None if conversation.leaf is None else number[id(conversation.leaf)],
        **({"notes": conversation.notes} if conversation.notes else {}),
        "turns": [
            {
                "parent": None if turn.parent is None else number[id(turn.parent)],
                "question": turn.question,
                "summary": turn.summary,
                **({"notes": turn.notes} if turn.notes else {}),
                "answer": _answer_data(turn.answer),
            }
            for turn in turns
        ],
    }


def _answer_data(answer: Answer) -> dict[str, Any]:
    data = {name: getattr(answer, name) for name in _OF_ANSWER}
    if answer.candidates:
        data["candidates"] = [{name: getattr(each, name) for name in _OF_CANDIDATE} for each in answer.candidates]
    return data


def from_data(data: Any) -> Conversation:
    """Convert JSON data to a conversation. The data comes from `to_data` of this or an earlier version.

    An answer that was still open gets the finish reason "lost".

    Raises:
        ValueError: the data is not a conversation. The message names the field.
    """
    try:
        return _conversation_of(data)
    except KeyError as error:
        raise ValueError(f"not a conversation: it has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"not a conversation: {error}") from None


def _conversation_of(data: Mapping[str, Any]) -> Conversation:
    conversation = Conversation(
        _checked(data["id"], "id", "id"),
        _checked(data["system"], "system", "str"),
        _checked(data["model"], "model", "str"),
        float(_checked(data["began"], "began", "float")),
        title=_checked(data.get("title", ""), "title", "str"),
        notes=_checked(data.get("notes", []), "notes", "texts"),
    )
    conversation.shortened = {
        _checked(name, "shortened", "id"): _checked(value, "shortened", "change")
        for name, value in _checked(data.get("shortened", {}), "shortened", "dict").items()
    }
    turns: list[Turn] = []
    for item in _checked(data["turns"], "turns", "list"):
        parent = _turn_at(item["parent"], turns, "parent")
        turn = Turn(_checked(item["question"], "question", "str"), _answer_of(item["answer"]), parent)
        turn.summary = _checked(item.get("summary", ""), "summary", "str")
        turn.notes = _checked(item.get("notes", []), "notes", "texts")
        conversation.siblings(turn).append(turn)
        turns.append(turn)
    conversation.leaf = _turn_at(data["leaf"], turns, "leaf")
    return conversation


def _turn_at(number: Any, turns: Sequence[Turn], name: str) -> Turn | None:
    if number is None:
        return None
    if _checked(number, name, "int") >= len(turns):
        raise ValueError(f"{name} is {number}, but there are {len(turns)} turns before it")
    return turns[number]


def _answer_of(data: Mapping[str, Any]) -> Answer:
    candidates = [
        Candidate(**_values(Candidate, _OF_CANDIDATE, each))
        for each in _checked(data.get("candidates", []), "candidates", "list")
    ]
    answer = Answer(**_values(Answer, _OF_ANSWER, data), candidates=candidates)
    both: list[Answer | Candidate] = [answer, *candidates]
    for each in both:
        each.finish_reason = each.finish_reason or "lost"
    return answer


def _values(kind: type[Answer] | type[Candidate], names: Collection[str], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked fields of an answer or candidate.

    Fields that are missing, as in earlier versions, are left out.
    """
    special = {"request_id": "id", "finish_reason": "ending"}
    found = {"text": data["text"]} | {name: data[name] for name in names if name in data}
    types = {item.name: str(item.type) for item in fields(kind)}
    return {name: _checked(value, name, special.get(name, types[name])) for name, value in found.items()}


_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "texts": ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value)),
    "dict": ("an object", lambda value: isinstance(value, dict)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number from 0", lambda value: type(value) is int and 0 <= value < _LARGEST),
    "int | None": ("a whole number from 0, or null", lambda v: v is None or (type(v) is int and 0 <= v < _LARGEST)),
    "change": ("a whole number", lambda value: type(value) is int and abs(value) < _LARGEST),
    "float": ("a number", lambda value: _is_number(value)),
    "float | None": ("a number or null", lambda value: value is None or _is_number(value)),
    "id": ("letters, digits, - and _", lambda value: isinstance(value, str) and _ID.fullmatch(value) is not None),
    "ending": ("stop, length, abort, lost or null", lambda value: value in _ENDINGS),
}  # a field's type, or its meaning -> a description of valid values, and a function that checks a value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST and math.isfinite(value)


def _checked(value: Any, name: str, kind: str) -> Any:
    """Return ``value`` if it passes the check ``_CHECKS[kind]``. Otherwise raise ValueError with the field's name."""
    words, is_right = _CHECKS[kind]
    if not is_right(value):
        raise ValueError(f"{name} must be {words}, not {shown(value)}")
    return value
