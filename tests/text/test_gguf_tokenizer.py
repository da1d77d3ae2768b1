"""Test tokenizers rebuilt from GGUF metadata against their originals."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lib.tokens import TEXTS, byte_level, metadata_of, random_texts, sentencepiece
from minillm.errors import WeightsError
from minillm.text.pre_tokenizers import LLAMA3
from minillm.text.tokenizer import Tokenizer


@pytest.mark.parametrize(("pre", "split"), [("smollm", None), ("llama-bpe", LLAMA3)])
def test_byte_level_bpe_is_rebuilt(tmp_path: Path, pre: str, split: str | None) -> None:
    directory = byte_level(tmp_path, split=split)
    original, rebuilt = Tokenizer.from_directory(directory), Tokenizer.from_gguf(metadata_of(directory, pre))
    for text in [*TEXTS, *random_texts(3000)]:
        assert rebuilt.encode(text) == original.encode(text), repr(text)
    assert rebuilt.control_ids == original.control_ids
    assert rebuilt.bos_token_id == original.bos_token_id


def plain_sentencepiece(text: str, vocabulary: dict[str, int], scores: list[float]) -> list[int]:
    """Encode with SentencePiece's BPE, written out: merge the adjacent pair with the best score, leftmost first."""
    pieces = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        candidates = [
            (-scores[vocabulary[left + right]], i)
            for i, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in vocabulary
        ]
        if not candidates:
            break
        _, i = heapq.nsmallest(1, candidates)[0]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    ids = []
    for piece in pieces:
        if piece in vocabulary:
            ids.append(vocabulary[piece])
        else:
            ids += [vocabulary[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


def test_sentencepiece_bpe_is_rebuilt_from_scores() -> None:
    rng = random.Random(5)
    letters = list("▁abcdehlortw.,'é")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces: set[str] = set()
    while len(pieces) < 150:
        known = letters + sorted(pieces)
        piece = rng.choice(known) + rng.choice(known)
        if len(piece) < 8 and piece not in letters:
            pieces.add(piece)
    tokens += sorted(pieces, key=len)
    scores = [0.0] * (3 + 256) + [-1000.0 - i for i in range(len(letters))]
    scores += [-float(i) for i in rng.sample(range(1, 151), 150)]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    ours = Tokenizer.from_gguf(metadata)
    vocabulary = {text: i for i, text in enumerate(tokens) if types[i] == 1 or text.startswith("<0x")}
    assert ours.encode("a")[0] == 1, "BOS comes first unless the metadata says otherwise"
    for _ in range(1500):
        text = "".join(rng.choice("abcdehlortw  .,'é🎉Z") for _ in range(rng.randint(0, 30)))
        expected = plain_sentencepiece(text, vocabulary, scores)
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == expected, repr(text)
        assert ours.decode(ids) == text
    assert not ours.control_ids.intersection(ours.encode("<s></s>", add_special_tokens=False))


def test_sentencepiece_without_the_space_before_the_text(tmp_path: Path) -> None:
    del tmp_path
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "▁", "a"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 1, 1],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode("a a") == [2, 1, 2]
    assert ours.decode([1, 2]) == " a"


@pytest.mark.weights
def test_the_default_model_tokenises_as_its_pre_tokenizer_says() -> None:
    """SmolLM's split, written out with the tokenizers library, on the real vocabulary and merges."""
    from tokenizers import decoders, models, pre_tokenizers

    from minillm.weights.files import find_downloaded

    files = find_downloaded("smollm2-135m")
    assert files is not None
    ours = Tokenizer.from_directory(files.path)
    state = json.loads((files.path / "tokenizer.json").read_text())["model"]
    theirs = tokenizers.Tokenizer(models.BPE(vocab=state["vocab"], merges=[tuple(m) for m in state["merges"]]))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    theirs.decoder = decoders.ByteLevel()
    for text in [*TEXTS, *random_texts(2000)]:
        assert ours.encode(text) == theirs.encode(text).ids
    assert ours.eos_token_id == 2
    assert ours.token_text(2) == "<|im_end|>"


def broken(**changes: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "bert"},
        {"model": None},
        {"pre": "no-such"},
        {"pre": 0},
        {"pre": ["smollm"]},
        {"tokens": ["a", "a", "ab"]},
        {"tokens": []},
        {"tokens": [1, 2, 3]},
        {"tokens": "abc"},
        {"token_type": [1]},
        {"merges": None},
        {"model": "llama", "scores": [1.0]},
        {"eos_token_id": "2"},
        {"bos_token_id": 0.5},
    ],
)
def test_damaged_metadata_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(WeightsError) as caught:
        Tokenizer.from_gguf(broken(**changes))
    assert "\n" not in str(caught.value)


def test_sound_metadata_is_not_refused(tmp_path: Path) -> None:
    assert Tokenizer.from_gguf(broken()).encode("abab") == [2, 2]
    assert sentencepiece(tmp_path).exists()
