"""Tokens that are declared outside tokenizer.json, against transformers' AutoTokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from lib.tokens import byte_level
from minillm.errors import WeightsError
from minillm.text.hf_tokenizer import read_directory
from minillm.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} <|im_end|>\n{% endfor %}<|im_start|>"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hm"}]
LETTERS = [*"etaoinshrdlucmfwypvbgkqjxz<|>_", "Ġ", "Ċ"]
START, END = "<|im_start|>", "<|im_end|>"


def written(
    directory: Path, config: dict[str, Any], files: dict[str, Any] | None = None, added: list[AddedToken] | None = None
) -> Path:
    """A byte-level tokenizer with ``<unk>``, ``<s>`` and ``</s>``; the first free id is 35."""
    names = ["<unk>", "<s>", "</s>"]
    backend = Library(
        models.BPE(vocab={text: i for i, text in enumerate([*names, *LETTERS])}, merges=[], unk_token="<unk>")
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(names)
    backend.add_tokens(added or [])
    backend.save(str(directory / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = {
        "tokenizer_config.json": {**base, "chat_template": TEMPLATE, **config},
        "config.json": {"model_type": "llama"},
    }
    for name, value in {**found, **(files or {})}.items():
        (directory / name).write_text(json.dumps(value))
    return directory


def compared(directory: Path) -> Tokenizer:
    """Ours, after it has shown the ids, names and texts of transformers."""
    ours, theirs = Tokenizer.from_directory(directory), transformers.AutoTokenizer.from_pretrained(directory)
    assert ours.apply_chat_template(MESSAGES) == theirs.apply_chat_template(MESSAGES, return_dict=False)
    for text in (f"a {START} b{END}c", "x <one> y <two>z", "<|extra|>  <|named|> a", " <one>one<two>"):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False, parse_special=True) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    return ours


def flags(text: str, **others: bool) -> dict[str, Any]:
    return {
        "content": text,
        **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False),
        "special": True,
        **others,
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[AddedToken]]] = {
    "a table": ({"added_tokens_decoder": {"35": flags(START), "36": flags(END)}, "eos_token": END}, {}, []),
    "a table with a gap": ({"added_tokens_decoder": {"40": flags(START), "37": flags(END)}}, {}, []),
    "a table that overrides a word": (
        {"added_tokens_decoder": {"5": flags("a", special=False), "36": flags(END)}},
        {},
        [],
    ),
    "strips": (
        {"added_tokens_decoder": {"35": flags(START, rstrip=True), "36": flags(END, lstrip=True)}},
        {},
        [AddedToken(START, special=True, normalized=False), AddedToken(END, special=True, normalized=False)],
    ),
    "a table of an ordinary word": (
        {"added_tokens_decoder": {"35": flags("<one>", special=False, single_word=True)}},
        {},
        [],
    ),
    "added_tokens.json": ({"eos_token": END}, {"added_tokens.json": {START: 35, END: 36, "<one>": 37}}, []),
    "added_tokens.json beside a table": (
        {"added_tokens_decoder": {"35": flags(START)}},
        {"added_tokens.json": {END: 35}},
        [],
    ),
    "extra tokens by their old name": ({"additional_special_tokens": [START, END, "<two>"]}, {}, []),
    "extra tokens": ({"extra_special_tokens": [START, "</s>", END]}, {}, []),
    "extra tokens with names": ({"extra_special_tokens": {"image_token": START, "boi": "<one>"}}, {}, []),
    "extra tokens that are ordinary": (
        {"extra_special_tokens": ["<one>"]},
        {},
        [AddedToken("<one>", normalized=False)],
    ),
    "names alone": ({"eos_token": END, "pad_token": "<two>", "image_token": "<|named|>", "mask_token": None}, {}, []),
    "a name of an ordinary token": ({"pad_token": "<one>"}, {}, [AddedToken("<one>", special=False, normalized=False)]),
    "a name with flags": ({"eos_token": {"__type": "AddedToken", **flags(END, lstrip=True)}}, {}, []),
    "a map of names": (
        {"eos_token": "</s>"},
        {"special_tokens_map.json": {"eos_token": flags(END), "additional_special_tokens": [START]}},
        [],
    ),
    "a map of names beside a table": (
        {"added_tokens_decoder": {"35": flags(START)}},
        {"special_tokens_map.json": {"eos_token": END}},
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_declared_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    config, files, added = CASES[name]
    compared(written(tmp_path, config, files, added))


def test_many_declarations_at_once(tmp_path: Path) -> None:
    rng = random.Random(4)
    texts = [START, END, "<one>", "<two>", "<|extra|>", "<|named|>"]
    for number in range(20):
        directory = tmp_path / str(number)
        directory.mkdir()
        some = lambda: rng.sample(texts, rng.randint(0, 3))  # noqa: E731
        odd = lambda: {flag: rng.random() < 0.3 for flag in ("lstrip", "rstrip", "special")}  # noqa: E731
        config: dict[str, Any] = {"extra_special_tokens": some()}
        if rng.random() < 0.5:
            config["added_tokens_decoder"] = {str(35 + i): flags(text, **odd()) for i, text in enumerate(some())}
        config |= dict(zip(rng.sample(("eos_token", "pad_token", "image_token"), 2), some(), strict=False))
        files = {"added_tokens.json": {text: 35 + i for i, text in enumerate(some())}} if rng.random() < 0.5 else {}
        compared(written(directory, config, files, [AddedToken(text, **odd(), normalized=False) for text in some()]))


def test_they_are_kept_by_saving(tmp_path: Path) -> None:
    ours = compared(written(tmp_path, {"added_tokens_decoder": {"35": flags(START, rstrip=True)}, "eos_token": END}))
    copy = tmp_path / "copy"
    copy.mkdir()
    ours.save(copy)
    again = Tokenizer.from_directory(copy)
    assert again.apply_chat_template(MESSAGES) == ours.apply_chat_template(MESSAGES)
    assert again.eos_token_id == ours.eos_token_id == 36


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": [1]}, {}),
        ({"added_tokens_decoder": {"x": flags(END)}}, {}),
        ({"added_tokens_decoder": {"35": {"special": True}}}, {}),
        ({"added_tokens_decoder": {"35": flags(END, lstrip=7)}}, {}),  # type: ignore[arg-type]
        ({"extra_special_tokens": [3]}, {}),
        ({"eos_token": {"content": 5}}, {}),
        ({}, {"added_tokens.json": {END: "no"}}),
        ({"extra_special_tokens": ["x" * 20_000]}, {}),
    ],
)
def test_damage_is_told_in_one_line(tmp_path: Path, config: dict[str, Any], files: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match=r"token") as caught:
        Tokenizer.from_directory(written(tmp_path, config, files))
    assert "\n" not in str(caught.value)


def test_a_template_may_spell_markers_that_are_no_tokens(tmp_path: Path) -> None:
    """TinyLlama's and Zephyr's templates do so: their models have learned the letters."""
    ours = compared(written(tmp_path, {}))
    assert len(ours.apply_chat_template(MESSAGES)) > 40
    assert Tokenizer.from_directory(byte_level(tmp_path)).eos_token_id is not None


def test_thousands_of_control_tokens_load_together(tmp_path: Path) -> None:
    """A call that adds tokens takes time in proportion to all tokens, so there must be few calls."""
    added = [AddedToken(f"<|{number}|>", special=True, normalized=True) for number in range(2000)]
    directory = written(tmp_path, {}, {}, added)
    calls: list[int] = []

    class Counting:
        def __init__(self, backend: Library) -> None:
            self.__dict__["backend"] = backend

        def __getattr__(self, name: str) -> Any:
            if name in ("add_tokens", "add_special_tokens"):
                calls.append(1)
            return getattr(self.backend, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.backend, name, value)

    backend, special, template, steps = read_directory(directory)
    ours = Tokenizer(Counting(backend), special, template, steps)  # type: ignore[arg-type]
    assert len(calls) <= 2
    assert ours.encode("<|1999|>", add_special_tokens=False, parse_special=True) == [35 + 1999]
