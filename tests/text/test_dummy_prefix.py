"""Texts that continue others, against the same tokenizer without the steps that put a space before a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lib.tokens import TEXTS, byte_level, random_texts, sentencepiece
from minillm.text.tokenizer import Tokenizer

SPACE = "▁"
METASPACE = {"type": "Metaspace", "replacement": SPACE}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
WORDS = {"type": "Split", "pattern": {"Regex": r"▁?[^▁]{1,7}|▁+"}, "behavior": "Isolated", "invert": False}


def sequence(members: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", members: list(steps)}


# Steps of tokenizer.json, and the same without a prefix.
STYLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prepend": ({}, {"normalizer": REPLACE}),
    "metaspace": (
        {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "first", "split": False}},
        {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "never", "split": False}},
    ),
    "metaspace, words apart": (
        {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "always", "split": True}},
        {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "never", "split": True}},
    ),
    "nested": (
        {"normalizer": sequence("normalizers", {"type": "NFC"}, sequence("normalizers", PREPEND, REPLACE))},
        {"normalizer": sequence("normalizers", {"type": "NFC"}, REPLACE)},
    ),
    "in a process of its own": ({"pre_tokenizer": WORDS}, {"normalizer": REPLACE, "pre_tokenizer": WORDS}),
    "byte level": ({"pre_tokenizer": BYTES}, {"pre_tokenizer": {**BYTES, "add_prefix_space": False}}),
    "byte level, whole": (
        {"pre_tokenizer": {**BYTES, "use_regex": False}},
        {"pre_tokenizer": {**BYTES, "use_regex": False, "add_prefix_space": False}},
    ),
    "no prefix": ({"pre_tokenizer": {**BYTES, "add_prefix_space": False}},) * 2,
}  # fmt: skip


@pytest.fixture(params=STYLES)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, tokenizers.Tokenizer]:
    """A directory, and the library's tokenizer for continuations."""
    name = str(request.param)
    directory = (byte_level if "byte" in name or name == "no prefix" else sentencepiece)(tmp_path)
    path, (whole, bare) = directory / "tokenizer.json", STYLES[name]
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, **whole}))
    return directory, tokenizers.Tokenizer.from_str(json.dumps({**state, **bare}))


def test_a_continuation_has_no_space_before_it(both: tuple[Path, tokenizers.Tokenizer], tmp_path: Path) -> None:
    directory, bare = both
    ours, theirs = (
        Tokenizer.from_directory(directory),
        tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")),
    )
    texts = [*TEXTS, "n", " hen", "'s", "!?", "\n", *random_texts(300)]
    for text in texts:
        if not any(spelled in text for spelled in ("<", ">", "[", "]")):
            more = ours.encode(text, add_special_tokens=False, continues=True)
            assert more == bare.encode(text, add_special_tokens=False).ids, repr(text)
            assert ours.encode(text) == theirs.encode(text).ids, repr(text)
    saved = tmp_path / "saved"
    saved.mkdir()
    ours.save(saved)
    again = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    assert again.encode("a hen").ids == theirs.encode("a hen").ids


def test_text_follows_text_and_begins_after_a_hidden_token(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(sentencepiece(tmp_path))
    text = ours.encode("the", add_special_tokens=False)
    assert ours.ends_in_text(text)
    assert not ours.ends_in_text([*text, 2])
    assert not ours.ends_in_text([])
    assert not ours.ends_in_text([10**6])


def test_a_typed_mark_is_dropped(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(sentencepiece(tmp_path))
    assert ours.encode("\ufdd2hen") == ours.encode("hen")


def test_pieces_of_a_spelled_control_token_stay_one_text() -> None:
    """A vocabulary that merges to a control token: its halves are encoded apart, and no space comes between them."""
    merges = [("▁", "a"), ("<", "s"), ("<s", ">")]
    vocabulary = {text: i for i, text in enumerate(["<", "s", ">", "<s", "<s>", "a", "▁", "▁a"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.normalizer = tokenizers.normalizers.Prepend("▁")
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    ours = Tokenizer(backend, {}, None)
    assert ours.decode(ours.encode("a<s>a")) == "a<s>a"
