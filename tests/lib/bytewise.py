"""A vocabulary of single bytes, to find the texts that a schema's grammar accepts and produces."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance

from minillm.grammar.notation import limited_matcher, notation
from minillm.grammar.trial_process import Bytes

_TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=257, eos_token=256)


def matcher(schema: Any) -> llguidance.LLMatcher:
    """Return a matcher at the beginning of a text. Raises ValueError where the grammar does not compile."""
    found = limited_matcher(_TOKENIZER, notation("json_schema", json.dumps(schema)))
    if found.is_error():
        raise ValueError(found.get_error())
    return found


def accepts(state: llguidance.LLMatcher, value: Any) -> bool:
    """Return whether a value, written as JSON, is a text of the grammar."""
    data, copy = json.dumps(value, ensure_ascii=False).encode(), state.deep_copy()
    return copy.try_consume_tokens(list(data)) == len(data) and copy.is_accepting()


def drawn(state: llguidance.LLMatcher, seed: int) -> str | None:
    """Return a text of the grammar, drawn at random; None where it does not end in time."""
    rng, copy, text = random.Random(seed), state.deep_copy(), bytearray()
    while len(text) < 300:
        if copy.is_accepting() and rng.random() < 0.5:
            return text.decode()
        allowed = int.from_bytes(copy.compute_bitmask(), "little")
        bytes_ = [byte for byte in range(256) if allowed >> byte & 1]
        if not bytes_:
            return text.decode() if copy.is_accepting() else None
        plain = [byte for byte in bytes_ if byte in b'abc"{}[],:012']
        byte = rng.choice(plain if plain and rng.random() < 0.95 else bytes_)
        assert copy.consume_token(byte)
        text.append(byte)
    return None
