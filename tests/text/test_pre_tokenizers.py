"""Test the pre-tokenizers that GGUF files name, against another regular expression engine."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from lib.tokens import TEXTS, byte_level, metadata_of, random_texts
from minillm.text.pre_tokenizers import _CASED, SPLITS, _class_of
from minillm.text.tokenizer import Tokenizer

# llama.cpp's lists (src/llama-vocab.cpp), where they are not one expression. Text that none matches is its own piece.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA_CPP = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-llm": [
        "[\r\n]",
        rf"\s?[{_class_of(_CASED)}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ],
    "hunyuan-dense": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


def pieces_of(text: str, patterns: list[str]) -> list[str]:
    pieces = [text] if text else []
    for pattern in patterns:
        cut: list[str] = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece):
                if match.end() > match.start():
                    cut += [piece[end : match.start()], match[0]]
                    end = match.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    return pieces


def texts() -> list[str]:
    rng = random.Random(7)
    letters = "abcXYZ éñÜß ǅʰªº αβΩ жЯ Աա ⴀ 北京一龥 こん カナ 한국 ไทย 0123456789 ٣४ ½Ⅷ \t\n\r  "
    letters += ".,;:!?'\"$+<=>^~|`_-—…。　！？"
    mixed = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 40))) for _ in range(1200)]
    return [*TEXTS, *random_texts(400), *mixed]


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_a_text_falls_into_the_pieces_of_llama_cpp(name: str) -> None:
    cuts: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name].patterns]
    split = pre_tokenizers.Sequence(cuts)
    for text in texts():
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces_of(text, LLAMA_CPP[name]), repr(text)


def test_deepseeks_letters_are_whole_runs_of_cased_ones() -> None:
    cased = {"Lu", "Ll", "Lt"}
    for entry in _CASED.split():
        first, last = (int(end, 16) for end in (*entry.split("-"), entry.split("-")[0])[:2])
        assert first <= last
        for code in range(first, last + 1):
            assert unicodedata.category(chr(code)) in (*cased, "Cn"), hex(code)
        assert unicodedata.category(chr(first)) in cased
        assert unicodedata.category(chr(last)) in cased


@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder", "default", "falcon3", "qwen2", None])
def test_a_gguf_file_may_name_it(tmp_path: Path, name: str | None) -> None:
    """Rebuilt from metadata, a tokenizer gives the ids of one that was made with the split itself."""
    split = SPLITS[name or "default"]
    directory = byte_level(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    cuts: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()  # as the models' own tokenizer.json says
    metadata = metadata_of(directory, name or "")
    if name is None:
        del metadata["tokenizer.ggml.pre"]
    ours = Tokenizer.from_gguf(metadata)
    backend.model.ignore_merges = split.ignore_merges
    for text in [*texts()[:1500], "e\u0301a", "한국"]:
        assert ours.encode(text) == backend.encode(text).ids, repr(text)


def test_letters_are_composed_where_the_models_own_tokenizer_does_so(tmp_path: Path) -> None:
    metadata = metadata_of(byte_level(tmp_path), "qwen2")
    ours, apart, composed = Tokenizer.from_gguf(metadata), "cafe\u0301", "caf\u00e9"
    assert ours.encode(apart) == ours.encode(composed)
    assert ours.decode(ours.encode(apart, add_special_tokens=False)) == composed
    other = Tokenizer.from_gguf(metadata_of(byte_level(tmp_path), "smollm"))
    assert other.encode(apart) != other.encode(composed)


@pytest.mark.parametrize(
    ("name", "bos"), [("falcon3", True), ("llama-bpe", True), ("default", False), ("qwen2", False)]
)
def test_bos_comes_first_where_the_split_says_so(tmp_path: Path, name: str, bos: bool) -> None:
    metadata = metadata_of(byte_level(tmp_path), name)
    del metadata["tokenizer.ggml.add_bos_token"]
    assert (Tokenizer.from_gguf(metadata).encode("a")[0] == metadata["tokenizer.ggml.bos_token_id"]) == bos
