"""Control tokens, and how text that merely spells one stays text.

A control token (``<|im_end|>``, ``</s>``, ``[INST]``) says something to the model that a user must not be able to say:
a user who could type one could forge a turn of the conversation. A tokenizer finds them by their spelling. So each
spelling in text that is not ours gets a character between its letters that exists nowhere else, and the tokenizer
drops it *after* it has looked for control tokens: the rest is tokenised like any other text, in its context.
"""

import re
from collections.abc import Iterable

from tokenizers import AddedToken

BREAK = "\ufdd0"  # Unicode keeps noncharacters for such inner use; they are taken out of text that comes in
END_OF_MESSAGE = "\ufdd1"  # marks where the last message ends while a chat template is rendered
CONTINUES = "\ufdd2"  # begins a text that continues another: see `minillm.text.dummy_prefix`

_MARKUP = re.compile(r"<\S+>|\[\S+\]|<\|.*\|>|<\uff5c.*\uff5c>", re.DOTALL)


def is_control(token: AddedToken) -> bool:
    """Whether an added token is for the model alone: it is marked special, or it looks like markup.

    DeepSeek's ``<｜User｜>`` is not marked special and opens a turn all the same. Runs of spaces, which some tokenizers
    add, are ordinary text.
    """
    return token.special or _MARKUP.fullmatch(token.content) is not None


def admissible(text: str) -> str:
    """``text`` without our own marks, and with U+FFFD for lone surrogates, which UTF-8 does not have."""
    if text.isascii():
        return text
    return re.sub("[\ud800-\udfff]", "\ufffd", re.sub(f"[{BREAK}{END_OF_MESSAGE}{CONTINUES}]", "", text))


class Spellings:
    """The spellings of some control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._starts = {text[:i] for text in self.texts for i in range(1, len(text))}
        self._ends = {text[i:] for text in self.texts for i in range(1, len(text))}
        self._longest = len(self.texts[0]) if self.texts else 0

    def count(self, text: str) -> int:
        """How many unbroken spellings ``text`` holds."""
        return sum(1 for _ in self._pattern.finditer(text))

    def broken(self, text: str) -> str:
        """``text`` in which no spelling is whole, nor can become whole with the text before or behind it."""
        text = self._pattern.sub(lambda match: BREAK.join(match[0]), text)
        if any(text[-i:] in self._starts for i in range(1, min(len(text) + 1, self._longest))):
            text += BREAK
        if any(text[:i] in self._ends for i in range(1, min(len(text) + 1, self._longest))):
            text = BREAK + text
        return text
