"""Keep untrusted text from turning into control tokens.

A control token (``<|im_end|>``, ``</s>``, ``[INST]``) structures the conversation. A user who could type control tokens
could forge a turn. A tokenizer finds control tokens by their spelling, which is their text. Therefore minillm *breaks*
each spelling in untrusted text: it inserts a reserved character, `BREAK`, between the letters. The tokenizer removes
`BREAK` after it has searched for control tokens, and tokenizes the letters like any other text.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from minillm.errors import WeightsError
from minillm.text.reasoning import CLOSE, OPEN
from minillm.text.tools import with_texts

BREAK = "\ufdd0"  # a Unicode noncharacter, reserved for internal use; `admissible` removes it from input
END_OF_MESSAGE = "\ufdd1"  # marks the end of the last message while a chat template is rendered
CONTINUES = "\ufdd2"  # begins a text that continues another text: see `minillm.text.dummy_prefix`

_MAX_CONTROL = 1 << 10  # maximum characters of a control token
_MARKUP = re.compile(r"<\S+>|\[\S+\]|<\|.*\|>|<\uff5c.*\uff5c>", re.DOTALL)


def is_control(token: AddedToken) -> bool:
    """Return whether an added token is a control token, because it is marked special or looks like markup.

    For example, DeepSeek's ``<｜User｜>`` opens a turn although it is not marked special. Other added tokens, such as
    runs of spaces, are ordinary text.
    """
    return token.special or _MARKUP.fullmatch(token.content) is not None


def admissible(text: str) -> str:
    """Remove minillm's reserved characters (`BREAK`, `END_OF_MESSAGE`, `CONTINUES`) from ``text``.

    Lone surrogates, which UTF-8 cannot encode, become U+FFFD.
    """
    if text.isascii():
        return text
    return re.sub("[\ud800-\udfff]", "\ufffd", re.sub(f"[{BREAK}{END_OF_MESSAGE}{CONTINUES}]", "", text))


class Spellings:
    """Finds the spellings of a set of control tokens in texts, and breaks them by inserting `BREAK`.

    A spelling is a control token typed as text, such as ``<|im_end|>``. Broken, it is encoded as ordinary text.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._starts = {text[:i] for text in self.texts for i in range(1, len(text))}
        self._ends = {text[i:] for text in self.texts for i in range(1, len(text))}
        self._longest = len(self.texts[0]) if self.texts else 0

    def count(self, text: str) -> int:
        """Count the control tokens that are spelled out in ``text`` without a `BREAK` inside."""
        return sum(1 for _ in self._pattern.finditer(text))

    def broken(self, text: str) -> str:
        """Return ``text`` with a `BREAK` between the characters of every control token that is spelled out.

        The end of one text and the beginning of another may spell a control token together. So if ``text`` begins or
        ends with a part of a spelling, a `BREAK` is added at that end of ``text``.
        """
        text = self._pattern.sub(lambda match: BREAK.join(match[0]), text)
        if any(text[-i:] in self._starts for i in range(1, min(len(text) + 1, self._longest))):
            text += BREAK
        if any(text[:i] in self._ends for i in range(1, min(len(text) + 1, self._longest))):
            text = BREAK + text
        return text


class ControlTokens:
    """The control tokens of a tokenizer. In untrusted texts, breaks their spellings, so that no text can contain them.

    Attributes:
        ids: the ids of the control tokens.

    Args:
        added: the added tokens of the tokenizer, by id.

    Raises WeightsError if a control token is too long.
    """

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        self._tokens = {token_id: token for token_id, token in added.items() if is_control(token)}
        self.ids = frozenset(self._tokens)
        longest = max((len(token.content) for token in self._tokens.values()), default=0)
        if longest > _MAX_CONTROL:  # `Spellings` takes memory quadratic in the length
            raise WeightsError(f"the tokenizer has a control token of {longest} characters, which no model has")
        self._spellings = Spellings(token.content for token in self._tokens.values())
        allowed = [text for text in self._spellings.texts if text not in (OPEN, CLOSE)]
        few = len(allowed) < len(self._spellings.texts)
        self._assistant_spellings = Spellings(allowed) if few else self._spellings

    def search_first(self, backend: tokenizers.Tokenizer) -> None:
        """Make the backend search for all control tokens before it normalizes the text."""
        found = [token for token in self._tokens.values() if token.normalized]
        if found:  # in one call: each takes time linear in the number of tokens
            backend.add_tokens([AddedToken(**{**token.__getstate__(), "normalized": False}) for token in found])

    def count(self, text: str) -> int:
        """Count the control tokens that are spelled out in ``text``."""
        return self._spellings.count(text)

    def broken(self, text: str) -> str:
        """Return an untrusted text in which every control token that is spelled out is broken by `BREAK`.

        minillm's reserved characters, such as `BREAK`, are first removed from the text.
        """
        return self._spellings.broken(admissible(text))

    def broken_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message of a conversation. Control tokens that its texts spell out are broken by `BREAK`.

        In the assistant's own texts, ``<think>`` and ``</think>`` are not broken, because chat templates look for them.
        """
        own = ("content", "reasoning_content") if message["role"] == "assistant" else ()
        broken: dict[str, Any] = {}
        for key, value in message.items():
            if key in own:
                broken[key] = self._assistant_spellings.broken(admissible(value))
            else:
                broken[key] = value if key == "role" else with_texts(value, self.broken)
        return broken
