"""Encodes by a stranger's tokenizer.json, in a `minillm.text.sandbox`."""

from typing import Any

import tokenizers

_MOST_TOKENS = 64  # for each character of a text, that a tokenizer may make of it
_loaded: list[tokenizers.Tokenizer] = []


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Take ``tokenizer``, a tokenizer.json; or give the ids of ``text``."""
    if "tokenizer" in request:
        _loaded[:] = [tokenizers.Tokenizer.from_str(request["tokenizer"])]
        return {}
    text = request["text"]
    ids = _loaded[0].encode(text, add_special_tokens=request["special"]).ids
    if len(ids) > _MOST_TOKENS * (len(text) + _MOST_TOKENS):
        raise ValueError(f"it makes {len(ids)} tokens of {len(text)} characters")
    return {"ids": ids}
