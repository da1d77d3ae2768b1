"""A model's vocabulary for grammars: the bytes of each token, and token masks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minillm.errors import MinillmError
from minillm.grammar.notation import library

if TYPE_CHECKING:
    import llguidance

NUM_CORES = len(os.sched_getaffinity(0))
# Groups of tokens that consist of JSON string characters. Each number is the maximum characters of the tokens in one
# group. If the grammar allows any text of that length next, the library allows the whole group at once, without testing
# each token. By default it has groups for 10, 30 and any number of characters. The groups for fewer characters speed up
# the last ten characters of bounded strings.
_RUNS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 30)
_MOST_FORCED = 2048  # maximum characters to encode of a forced text: a mask has only its first token
_MARK = "\x02"  # before a text to encode: some tokenizers treat the beginning of a text differently


class Vocabulary:
    """A model's tokens. Computes masks of the tokens that a grammar allows next.

    Args:
        tokens: the bytes of each token of the model, by id. Control tokens and unused ids have no bytes, and no grammar
            allows them.
        encode: encodes a text without special tokens. If a grammar forces the next bytes, a mask has only the first
            token that this function chooses for these bytes. `Matcher.spellings` returns the other possible tokens.
    """

    def __init__(self, tokens: Sequence[bytes], encode: Callable[[str], Sequence[int]]) -> None:
        package = library()
        self.size = len(tokens)
        self.num_words = self.size // 32 + 1  # 32-bit words of a mask: one bit for each id, and one for the text's end
        self._encode = encode
        # The end of a text gets an id of its own, after the model's ids, because each request has its own end tokens.
        self._tokens = (*tokens, b"")
        self._ids = {data: token_id for token_id, data in reversed(list(enumerate(tokens))) if data}
        self._longest = max(map(len, self._ids), default=0)
        self.tokenizer: llguidance.LLTokenizer = package.LLTokenizer(
            package.TokenizerWrapper(_Tokens(self._tokens, self.size, self.encode)),
            n_vocab=self.size + 1,
            eos_token=self.size,
            slices=_slices(),
        )

    @cached_property
    def _executor(self) -> Any:
        # With up to 4 cores, use all of them, because the caller only waits for the masks. With more cores, the library
        # leaves some free.
        return library().LLExecutor(NUM_CORES if NUM_CORES <= 4 else None)

    def fill(self, states: Sequence[llguidance.LLMatcher], words: NDArray[np.uint32]) -> list[bool]:
        """Compute masks of the allowed next tokens, for several sequences at a time.

        Args:
            states: the llguidance matcher of each sequence. Sequences may share a matcher.
            words: ``[states, num_words]``, contiguous; receives the masks. Bit ``i % 32`` of word ``i // 32`` is set if
                token ``i`` is allowed. If no text can follow or the state has an error, no bit is set.

        Returns:
            For each sequence, whether its text may end here. It is also True if the state has an error.
        """
        assert words.flags.c_contiguous, "the library writes to the memory itself"
        first: dict[int, int] = {}  # the first row of each matcher, by its id()
        for row, state in enumerate(states):
            first.setdefault(id(state), row)
        size = self.num_words * 4
        if len(first) == 1:
            states[0].unsafe_compute_mask_ptr(words.ctypes.data, size)
        else:
            rows = [(states[row], row) for row in first.values()]
            self._executor.unsafe_compute_mask_ptr(rows, words.ctypes.data, size, len(states))
        if len(first) < len(states):
            words[:] = words[[first[id(state)] for state in states]]
        end, bit = words[:, self.size // 32], np.uint32(1 << self.size % 32)
        may_end: list[bool] = (end & bit != 0).tolist()
        end &= ~bit
        return may_end

    def along(self, text: bytes) -> list[int]:
        """Return the ids of all tokens that begin ``text``, and of all tokens that begin with ``text``."""
        tokens = enumerate(self._tokens[: self.size])
        return [each for each, data in tokens if data and (text.startswith(data) or data.startswith(text))]

    def encode(self, text: str) -> list[int]:
        """Encode ``text``, which continues another text. Stop at the first byte that cannot be encoded.

        Return token ids.

        llguidance calls this method to choose tokens when the grammar forces the next bytes.
        """
        wanted = text.encode("utf-8", "surrogateescape")
        try:
            ids = list(self._encode(_MARK + text))
        except MinillmError:
            return self._longest_first(wanted)
        mark, spelled = _MARK.encode(), b""
        for number, token_id in enumerate(ids, 1):
            spelled += self._tokens[token_id]
            if spelled.endswith(mark):
                if b"".join(self._tokens[each] for each in ids[number:]) == wanted:
                    return ids[number:]
                break
        return self._longest_first(wanted)

    def _longest_first(self, data: bytes) -> list[int]:
        """Encode ``data``, taking the longest possible token each time. Return token ids.

        Stop at the first position where no token fits.
        """
        ids, at = [], 0
        while at < len(data):
            lengths = range(min(self._longest, len(data) - at), 0, -1)
            token_id = next((self._ids[part] for n in lengths if (part := data[at : at + n]) in self._ids), None)
            if token_id is None:
                break
            ids.append(token_id)
            at += len(self._tokens[token_id])
        return ids


def _slices() -> list[str]:
    """Return groups of tokens for llguidance, which can allow a whole group at once.

    Each group contains the previous one.

    Each group is a regular expression that matches the texts of its tokens. See `_RUNS`.
    """
    space, *_, character = library().LLTokenizer.json_slices()
    character = character.removesuffix("+")
    return [space, *(f"{character}{{1,{most}}}" for most in _RUNS), f"{character}+"]


class _Tokens:
    """Adapts a `Vocabulary` to the interface that llguidance expects of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, (end,)
        self._encode = lru_cache(4096)(encode)  # forced texts, such as a name and its colon, repeat often

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "surrogateescape")
        return self._encode(text[:_MOST_FORCED])
