"""Test decoding against the library's decoders: added tokens with the decoders' marks, and stripped spaces."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from minillm.text.sandbox import quiet
from minillm.text.tokenizer import Tokenizer

ADDED = ["▁▁", "▁▁▁▁", "<0x41>", "é", "  ", "Ġ", "<tool>", " a ", "<｜User｜>"]
FUSE, FALLBACK, SPACES = decoders.Fuse(), decoders.ByteFallback(), decoders.Replace("▁", " ")
DECODERS: dict[str, list[Any]] = {
    "plain": [SPACES, FALLBACK, FUSE],
    "strips one": [SPACES, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)],
    "strips two": [SPACES, FALLBACK, FUSE, decoders.Strip(" ", 2, 0)],
    "strips the end": [SPACES, FALLBACK, FUSE, decoders.Strip(" ", 0, 1)],
    "strips both ends": [SPACES, FALLBACK, FUSE, decoders.Strip(" ", 1, 3)],
    "strips twice": [SPACES, FALLBACK, FUSE, decoders.Strip(" ", 1, 0), decoders.Strip(" ", 1, 1)],
    "strips each": [SPACES, FALLBACK, decoders.Strip(" ", 1, 0)],
    "strips the end of each": [SPACES, FALLBACK, decoders.Strip(" ", 0, 1), FUSE],
    "byte level": [decoders.ByteLevel()],
}


def decoded(backend: tokenizers.Tokenizer, ids: list[int]) -> str:
    """The library's text; U+FFFD where it panics, as it does of a text that is shorter than the spaces to strip."""
    try:
        with quiet():
            return str(backend.decode(ids, skip_special_tokens=True))
    except BaseException as error:
        if "index" not in str(error):
            raise
        return "\ufffd"


@pytest.mark.parametrize("name", DECODERS)
def test_text_is_the_librarys(name: str) -> None:
    texts = ["<unk>", "<s>", "▁", "a", "b", "▁▁a", "a▁", "c▁▁", "▁▁▁▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    parts = DECODERS[name]
    backend.decoder = parts[0] if len(parts) == 1 else decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts[:2]])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    theirs, ours = tokenizers.Tokenizer.from_str(backend.to_str()), Tokenizer(backend, {}, None)
    rng = random.Random(1)
    usual = [*range(9), *range(9 + 256, ours.vocab_size)]
    num_same = 0
    for _ in range(1500):
        ids = [
            rng.choice(usual) if rng.random() < 0.95 else rng.randrange(9, 9 + 128) for _ in range(rng.randint(1, 7))
        ]
        if "each" in name:  # one byte at a time: the library makes one entry of a run
            ids = [each for each, before in zip(ids, [0, *ids], strict=False) if not min(each, before) > 8]
        expected = decoded(theirs, ids)
        if "\ufffd" not in expected:  # of how many stand-ins an invalid sequence becomes, see the tokenizer's docstring
            assert ours.decode(ids) == expected, ids
            stream = ours.detokenizer()
            assert "".join([*map(stream.push, ids), stream.finish()]) == expected
            num_same += 1
    assert num_same > 300


def test_added_tokens_of_a_gguf_file_are_shown_as_written() -> None:
    """llama.cpp's converter writes a run of spaces as spaces."""
    tokens = ["<unk>", "▁", "a", "▁▁", "  ", "é"]
    metadata = {"model": "llama", "tokens": tokens, "token_type": [2, 1, 1, 4, 4, 4], "add_space_prefix": False}
    ours = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert ours.decode([2, 3, 4, 5]) == "a▁▁  é"
