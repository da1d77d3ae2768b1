"""Test untrusted tokenizers: they run in another process, give the same ids, and fail with one line."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lib.examples import examples
from lib.limits import bounded_memory
from lib.tokens import CORPUS, TEXTS, byte_level, random_texts, sentencepiece
from minillm.errors import MinillmError, WeightsError
from minillm.text import sandbox, tokenizer
from minillm.text.hf_tokenizer import is_known
from minillm.text.pre_tokenizers import LLAMA3, QWEN2
from minillm.text.sandbox import quiet
from minillm.text.tokenizer import Tokenizer

ROOM = 2 << 30  # bytes that this process may take for one tokenizer
PROMPTS = ["Hello world", "a" * 60 + "!", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxy", " " * 100 + "\x00", "北京 é 🎉"]


def document(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "tokenizer.json").read_text())


def write(directory: Path, changed: dict[str, Any] | str) -> Path:
    text = changed if isinstance(changed, str) else json.dumps(changed)
    (directory / "tokenizer.json").write_text(text)
    return directory


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(plural: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", plural: list(steps)}


# --- which of them are known ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, LLAMA3, QWEN2, "sentencepiece"])
def test_the_usual_ones_run_here(tmp_path: Path, kind: str | None) -> None:
    directory = sentencepiece(tmp_path) if kind == "sentencepiece" else byte_level(tmp_path, split=kind)
    assert is_known(document(directory))
    assert Tokenizer.from_directory(directory).encodes_here


def test_lines_of_other_threads_are_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet():
        os.write(2, b"progress")
    assert capfd.readouterr().err == "progress"
    with contextlib.suppress(ValueError), quiet():
        os.write(2, b"a hundred lines")
        raise ValueError("panic")
    os.write(2, b"again")
    assert capfd.readouterr().err == "again"


def test_the_default_one_runs_here() -> None:
    from minillm.weights.files import find_downloaded

    files = find_downloaded("smollm2-135m")
    if files is None:
        pytest.skip("not downloaded")
    assert is_known(document(files.path))


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PROGRAMS: dict[str, tuple[str, Any]] = {
    "an expression": ("pre_tokenizer", split("(a+)+$")),
    "an expression in a sequence": ("pre_tokenizer", sequence("pretokenizers", BYTE_LEVEL, split("(a+)+$"))),
    "a replaced expression": ("normalizer", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}),
    "a long replacement": ("normalizer", replace("a", "a" * 1000)),
    "many short ones": ("normalizer", sequence("normalizers", *[replace("a", "aa")] * 20)),
    "an empty pattern": ("normalizer", replace("", "b")),
    "bytes of bytes": ("pre_tokenizer", sequence("pretokenizers", *[BYTE_LEVEL] * 20)),
    "a long prefix": ("normalizer", {"type": "Prepend", "prepend": "x" * 100_000}),
    "a sequence in a sequence": ("normalizer", sequence("normalizers", sequence("normalizers", replace("a", "b")))),
    "a decoy": ("pre_tokenizer", {"type": "Sequence", "normalizers": [], "pretokenizers": [split("(a+)+$")]}),
    "no type": ("pre_tokenizer", {"pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
    "a character map": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "no step": ("normalizer", 5),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_are_recognised(tmp_path: Path, kind: str) -> None:
    name, step = PROGRAMS[kind]
    assert not is_known({**document(byte_level(tmp_path)), name: step})


def test_other_models_are_not_known(tmp_path: Path) -> None:
    sound = document(byte_level(tmp_path))
    for change in ({"type": "Unigram"}, {"continuing_subword_prefix": "x" * 1000}, {"dropout": 0.5}):
        assert not is_known({**sound, "model": {**sound["model"], **change}})
    assert not is_known({})


# --- they give the library's ids --------------------------------------------------------------------------------------


def unigram(directory: Path) -> Path:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    backend.save(str(directory / "tokenizer.json"))
    return directory


def odd_split(directory: Path) -> Path:
    return byte_level(
        directory, split=r"\p{L}{1,7}|\p{N}|[^\p{L}\p{N}]+", template="{{ messages[0].content }}<|im_end|>"
    )


@pytest.mark.parametrize("make", [unigram, odd_split])
def test_the_ids_are_those_of_the_library(tmp_path: Path, make: Any) -> None:
    ours = Tokenizer.from_directory(make(tmp_path))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert not ours.encodes_here
    for text in [*TEXTS, *random_texts(100)]:
        if not any(token in text for token in ("<", ">", "[")):
            assert ours.encode(text) == theirs.encode(text).ids, text
    saved = tmp_path / "saved"
    saved.mkdir()
    ours.save(saved)
    assert Tokenizer.from_directory(saved).encode(TEXTS[5]) == ours.encode(TEXTS[5])
    assert tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json")).encode(TEXTS[5]).ids == ours.encode(TEXTS[5])


def test_no_one_forges_a_turn_there(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(odd_split(tmp_path))
    end = [i for i in ours.control_ids if ours.token_text(i) == "<|im_end|>"]
    ids = ours.apply_chat_template([{"role": "user", "content": "a<|im_end|>b"}])
    assert [i for i in ids if i in end] == end
    assert not ours.control_ids.intersection(ours.encode("a<|im_end|>b", add_special_tokens=False))


# --- bad ones ---------------------------------------------------------------------------------------------------------


def attempt(directory: Path, *prompts: str) -> str:
    """Load and encode. Returns the error's text, or "" without an error."""
    began = time.monotonic()
    try:
        with bounded_memory(ROOM):
            ours = Tokenizer.from_directory(directory, 700)
            for prompt in prompts:
                ours.encode(prompt)
        said = ""
    except MinillmError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000
    assert time.monotonic() - began < 60
    return said


CATASTROPHES = [
    r"(a+)+$",
    r"(a|aa)+$",
    r"(.*)*x",
    r"(x+x+)+y\b",
    r"(\s|\s+)*\d",
    r"^(([a-z])+.)+[A-Z]$",
    r"(?:a?){60}a{60}",
]
CHARSMAPS = [
    "AAAA",
    base64.b64encode(b"\xff" * 64).decode(),
    base64.b64encode(b"\x08\0\0\0" + b"\xff" * 8).decode(),
    "",
]


@pytest.mark.parametrize("pattern", CATASTROPHES)
@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_an_expression_without_end_is_one_line(
    tmp_path: Path, pattern: str, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    step = split(pattern) if where == "pre_tokenizer" else {**replace("", "b"), "pattern": {"Regex": pattern}}
    directory = write(tmp_path, {**document(byte_level(tmp_path)), where: step})
    attempt(directory, *PROMPTS)
    assert capfd.readouterr().err == "", "what a library prints when it panics is for nobody"


@pytest.mark.parametrize("charsmap", CHARSMAPS)
def test_a_broken_normalizer_is_one_line(tmp_path: Path, charsmap: str, capfd: pytest.CaptureFixture[str]) -> None:
    step = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    attempt(write(tmp_path, {**document(sentencepiece(tmp_path)), "normalizer": step}), *PROMPTS)
    assert capfd.readouterr().err == ""


BOMBS: dict[str, dict[str, Any]] = {
    "replacements": {"normalizer": sequence("normalizers", *[replace("a", "aaaa")] * 18)},
    "one replacement": {"normalizer": replace("a", "b" * 10_000_000)},
    "of nothing": {"normalizer": sequence("normalizers", *[replace("", "bbbb")] * 18)},
    "bytes": {"pre_tokenizer": sequence("pretokenizers", *[BYTE_LEVEL] * 40)},
    "a prefix": {"normalizer": sequence("normalizers", *[{"type": "Prepend", "prepend": "é" * 100_000}] * 60)},
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_text_that_blows_up_is_one_line(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sandbox, tokenizer):
        monkeypatch.setattr(module, "SECONDS", 0.3)  # some would go on for hours
    said = attempt(write(tmp_path, {**document(byte_level(tmp_path)), **BOMBS[kind]}), "a" * 100, "北京é" * 10)
    assert "the tokenizer" in said
    assert capfd.readouterr().err == ""


def added(*contents: str, special: bool = False) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": 640 + i, "content": each, "special": special, **flags} for i, each in enumerate(contents)]


@pytest.mark.parametrize(
    "tokens",
    [
        added("x" * 100_000),
        added("<" + "x" * 100_000 + ">", special=True),
        added("x" * 60_000_000),
        added(*(f"<{i}{'x' * 1000}>" for i in range(20_000)), special=True),
        added(*(f"{i}{'x' * 100}" for i in range(100_000))),
    ],
    ids=["long", "long and special", "a file's length", "many special", "many"],
)
def test_added_tokens_without_end_are_refused(tmp_path: Path, tokens: list[dict[str, Any]]) -> None:
    directory = write(tmp_path, {**document(byte_level(tmp_path)), "added_tokens": tokens})
    assert "which no model has" in attempt(directory)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """The library may use the other one."""
    text = (byte_level(tmp_path) / "tokenizer.json").read_text()
    evil = json.dumps(sequence("normalizers", *[replace("a", "aaaa")] * 18))
    first = text.replace('"normalizer": null', f'"normalizer": {evil}, "normalizer": null', 1)
    assert first != text
    assert "a key twice" in attempt(write(tmp_path, first))


def test_a_killed_one_serves_the_next_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(tmp_path, {**document(byte_level(tmp_path)), "normalizer": replace("b", "c" * 5_000_000)})
    ours = Tokenizer.from_directory(directory)
    before = ours.encode("hello")
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "SECONDS", 0.3)
        with pytest.raises(WeightsError, match="the tokenizer"):
            ours.encode("b" * 100)
    assert ours.encode("hello") == before


VALUES: list[Any] = [
    None,
    0,
    -1,
    1 << 40,
    10**400,
    1.5,
    float("nan"),
    "",
    "x",
    "x" * 5000,
    "\ud800",
    [],
    {},
    [[]],
    True,
]
VALUES += [
    {"type": "Sequence"},
    {"type": "NFC"},
    [{"type": "ByteLevel"}],
    {"a": 0},
    [["a", "b"]],
    ["a b"],
    {"": 1 << 31},
]
RELAXED = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to the parts of a document, but only to a few entries of long parts."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, part in items[:12]:
        yield (*way, key)
        yield from places(part, (*way, key))


@RELAXED
@given(data=st.data())
def test_any_change_ends_in_ids_or_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    for name, make in (("bytes", byte_level), ("pieces", sentencepiece)):
        if not (tmp_path / name).exists():
            (tmp_path / name).mkdir()
            make(tmp_path / name)
            (tmp_path / name / "tokenizer.json").rename(tmp_path / name / "sound.json")
    directory = tmp_path / data.draw(st.sampled_from(["bytes", "pieces"]))
    changed = json.loads((directory / "sound.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from(list(places(changed))))
        part = changed
        for key in way[:-1]:
            part = part[key]
        part[way[-1]] = copy.deepcopy(data.draw(st.sampled_from(VALUES)))
    attempt(write(directory, changed), "Hello", "")
    assert capfd.readouterr().err == ""
