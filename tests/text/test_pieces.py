"""Chats encoded piece by piece: the ids of the whole text, whatever was kept before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from lib.tokens import TEXTS, byte_level, sentencepiece
from minillm import LLM
from minillm.text import pieces
from minillm.text.pieces import Pieces
from minillm.text.pre_tokenizers import LLAMA3
from minillm.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
ODD = [
    " ",
    "\n",
    "<|",
    "|>",
    "im_end",
    "a",
    "é",
    "漢",
    "🙂",
    "\t",
    "<|im_end|>",
    "[/INST]",
    "</s>",
    "<think>",
    "        ",
]


def some_text(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(TEXTS) + rng.choice(TEXTS)
    return "".join(rng.choice(ODD) for _ in range(rng.randrange(40)))


def chats(tokenizer: Tokenizer, count: int, seed: int) -> None:
    """Compare ``count`` growing chats with the ids of the whole text."""
    rng = random.Random(seed)
    kept = tokenizer._pieces
    messages: list[dict[str, str]] = []
    assert kept is not None
    for _ in range(count):
        if len(messages) > 8 or rng.random() < 0.1:
            messages = []
        role = "user" if len(messages) % 2 == 0 else "assistant"
        messages.append({"role": role, "content": some_text(rng)})
        options: dict[str, Any] = {"add_generation_prompt": rng.random() < 0.5}
        got = tokenizer.apply_chat_template(messages, owner=rng.choice([None, "x"]), **options)
        tokenizer._pieces = None
        whole = tokenizer.apply_chat_template(messages, **options)
        tokenizer._pieces = kept
        assert got == whole, messages


@pytest.mark.parametrize("kind", ["smollm", "llama3", "sentencepiece"])
def test_pieces_have_the_ids_of_the_whole_chat(tmp_path: Path, kind: str) -> None:
    if kind == "sentencepiece":
        directory = sentencepiece(tmp_path, template=MISTRAL)
    else:
        directory = byte_level(tmp_path, split=LLAMA3 if kind == "llama3" else None, template=CHATML)
    chats(Tokenizer.from_directory(directory), 400, seed=1)


@pytest.mark.weights
def test_pieces_of_the_default_model(llm: LLM) -> None:
    chats(llm.tokenizer, 400, seed=2)


@pytest.mark.soak
def test_many_chats(tmp_path: Path, llm: LLM) -> None:
    chats(llm.tokenizer, 50_000, seed=3)
    chats(Tokenizer.from_directory(sentencepiece(tmp_path, template=MISTRAL)), 50_000, seed=4)


def test_a_piece_is_encoded_once_for_each_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [ord(letter) for letter in text]

    kept = Pieces({"<a>": 1000, "<ab>": 2000}, encode)
    assert kept.ids("<a>x<ab>yz") == [1000, ord("x"), 2000, ord("y"), ord("z")]
    assert kept.ids("yz<a><a>x") == [ord("y"), ord("z"), 1000, 1000, ord("x")]
    assert encoded == ["x", "yz"]
    kept.ids("x<a>yz", "somebody")
    assert encoded == ["x", "yz", "x", "yz"], "another owner's time must not depend on them"
    monkeypatch.setattr(pieces, "_MOST_CHARACTERS", 4)
    for text in ("abc", "de", "too long"):
        kept.ids(text)
    assert sum(len(text) for _, text in kept._kept) <= 4
    encoded.clear()
    kept.ids("de")
    kept.ids("abc")
    assert encoded == ["abc"], "the oldest goes first"


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"lstrip": True}, {}),
        ({"rstrip": True}, {}),
        ({"single_word": True}, {}),
        ({"normalized": True}, {}),
        ({}, {"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}}),
    ],
)
def test_a_tokenizer_whose_pieces_depend_on_each_other_has_none(changes: dict[str, bool], steps: Any) -> None:
    token = AddedToken("<a>", **{"normalized": False, **changes})
    assert Pieces.of({7: token}, steps, lambda text: []) is None
    assert Pieces.of({7: AddedToken("<a>", normalized=False)}, {}, lambda text: []) is not None
