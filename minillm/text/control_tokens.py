"""Keep untrusted text from turning into control tokens.

A control token (``<|im_end|>``, ``</s>``, ``[INST]``) structures the conversation. A user who could type one could
forge a turn. A tokenizer finds control tokens by their spelling. Therefore minillm inserts a reserved character, the
break, between the letters of each spelling in untrusted text. The tokenizer drops the break *after* it has searched for
control tokens. The rest is tokenized like any other text, in its context.
"""

import re
from collections.abc import Iterable

from tokenizers import AddedToken

BREAK = "\ufdd0"  # a Unicode noncharacter, reserved for internal use; `admissible` removes it from input
END_OF_MESSAGE = "\ufdd1"  # marks the end of the last message while a chat template is rendered
CONTINUES = "\ufdd2"  # begins a text that continues another: see `minillm.text.dummy_prefix`

_MARKUP = re.compile(r"<\S+>|\[\S+\]|<\|.*\|>|<\uff5c.*\uff5c>", re.DOTALL)


def is_control(token: AddedToken) -> bool:
    """Return whether an added token is a control token: it is marked special, or it looks like markup.

    DeepSeek's ``<｜User｜>`` opens a turn although it is not marked special. Runs of spaces, which some tokenizers add,
    are ordinary text.
    """
    return token.special or _MARKUP.fullmatch(token.content) is not None


def admissible(text: str) -> str:
    """Remove minillm's reserved characters, `BREAK` and so on, from ``text``.

    Lone surrogates, which UTF-8 cannot encode, become U+FFFD.
    """
    if text.isascii():
        return text
    return re.sub("[\ud800-\udfff]", "\ufffd", re.sub(f"[{BREAK}{END_OF_MESSAGE}{CONTINUES}]", "", text))


class Spellings:
    """The spellings of a set of control tokens: finds and breaks them in a text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._starts = {text[:i] for text in self.texts for i in range(1, len(text))}
        self._ends = {text[i:] for text in self.texts for i in range(1, len(text))}
        self._longest = len(self.texts[0]) if self.texts else 0

    def count(self, text: str) -> int:
        """Count the spellings in ``text`` that are not broken."""
        return sum(1 for _ in self._pattern.finditer(text))

    def broken(self, text: str) -> str:
        """Return ``text`` with a `BREAK` between the characters of every spelling.

        A `BREAK` is also added at an end of ``text`` where adjacent text could complete a spelling.
        """
        text = self._pattern.sub(lambda match: BREAK.join(match[0]), text)
        if any(text[-i:] in self._starts for i in range(1, min(len(text) + 1, self._longest))):
            text += BREAK
        if any(text[:i] in self._ends for i in range(1, min(len(text) + 1, self._longest))):
            text = BREAK + text
        return text
