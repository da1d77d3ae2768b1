"""Control tokens, and how text that merely spells one stays text.

A control token (``<|im_end|>``, ``</s>``, ``[INST]``) means something to the model that a user must not be able to say:
whoever could type one could forge a turn of the conversation. The tokenizer finds them by their spelling, so each
spelling in a user's text is broken by a character that exists nowhere else and that the tokenizer drops *after* it has
looked for control tokens. What is left is tokenised like any other text, in its context.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import AddedToken

from minillm.errors import WeightsError
from minillm.text import clean_line

BREAK = "\ufdd0"  # Unicode keeps noncharacters for such inner use; they are taken out of texts that come in
END_OF_MESSAGE = "\ufdd1"  # marks where the last message's content ends while a chat template is rendered

_OUTSIDE = re.compile(f"[\ud800-\udfff{BREAK}{END_OF_MESSAGE}]")
_MARKUP = re.compile(r"<\S+>|\[\S+\]|<\|.+\|>|<\uff5c.+\uff5c>", re.DOTALL)
_MAX_LENGTH = 256  # characters of a control token; the longest known has 40


def is_control(token: AddedToken) -> bool:
    """Whether an added token is for the model alone: it is marked special, or it looks like markup.

    DeepSeek's ``<｜User｜>`` is not marked special and opens a turn all the same. Runs of spaces, which code models
    add, are ordinary text.
    """
    return token.special or _MARKUP.fullmatch(token.content) is not None


def admissible(text: str) -> str:
    """``text`` without the characters of our own, and with U+FFFD for lone surrogates, which UTF-8 does not have."""
    if text.isascii():
        return text
    return _OUTSIDE.sub(lambda match: "" if match.group() in (BREAK, END_OF_MESSAGE) else "\ufffd", text)


@dataclass(frozen=True)
class ControlTexts:
    """The spellings of control tokens. Made by `of`."""

    texts: frozenset[str]
    lengths: tuple[int, ...]
    starts: re.Pattern[str]  # the first character of a spelling, the second one ahead: a cheap filter

    @classmethod
    def of(cls, texts: Iterable[str]) -> ControlTexts:
        """Raises WeightsError for a spelling that cannot be broken, of one character, or of an absurd length."""
        spellings = frozenset(texts)
        followers: dict[str, set[str]] = {}
        for text in spellings:
            if not 2 <= len(text) <= _MAX_LENGTH:
                raise WeightsError(
                    f"control token {clean_line(text, 40)!r} has {len(text)} characters; 2 to {_MAX_LENGTH} are supported"
                )
            followers.setdefault(text[0], set()).add(re.escape(text[1]))
        pattern = "|".join(f"{re.escape(first)}(?=[{''.join(sorted(after))}])" for first, after in followers.items())
        lengths = tuple(sorted({len(text) for text in spellings}))
        return cls(spellings, lengths, re.compile(pattern or r"(?!)"))

    def break_in(self, text: str) -> str:
        """``text`` with `BREAK` inside each spelling, and inside an unfinished one at its end.

        A template may put another text right behind this one, which must not be able to finish a spelling.
        """

        def broken(match: re.Match[str]) -> str:
            start = match.start()
            spelled = any(text[start : start + length] in self.texts for length in self.lengths)
            return match.group() + BREAK if spelled else match.group()

        return self._break_end(self.starts.sub(broken, text))

    def _break_end(self, text: str) -> str:
        longest = self.lengths[-1] if self.lengths else 0
        firsts = {spelling[0] for spelling in self.texts}
        for start in range(len(text) - 1, max(-1, len(text) - longest), -1):
            end = text[start:]
            if end[0] in firsts and any(spelling.startswith(end) for spelling in self.texts):
                text = text[: start + 1] + BREAK + text[start + 1 :]
        return text
