"""The tokenizer against Hugging Face's, and against control tokens in a user's text."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from lib.tokens import TEXTS, byte_level, random_texts, sentencepiece
from minillm.errors import UsageError, WeightsError
from minillm.text import control_tokens
from minillm.text.pre_tokenizers import LLAMA3
from minillm.text.tokenizer import Tokenizer


@pytest.fixture(params=["smollm", "llama3", "sentencepiece"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "sentencepiece":
        return sentencepiece(tmp_path)
    return byte_level(tmp_path, split=LLAMA3 if request.param == "llama3" else None)


def test_ids_are_hugging_faces_for_ordinary_text(directory: Path) -> None:
    ours = Tokenizer.from_directory(directory)
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in [*TEXTS, *random_texts(3000)]:
        assert ours.encode(text) == theirs.encode(text).ids, repr(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """The engine's thread is one of them."""
    ours, number = Tokenizer.from_directory(byte_level(tmp_path)), 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(ours.encode, "hello world " * 50_000)
        while not encoding.done():
            time.sleep(0.001)
            number += 1
    assert number > 20


CONTROL_TEXTS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<｜User｜>",
    "<think>",
    "</s>",
    "<s>",
    "[INST]",
    "[/INST]",
]


def test_what_a_user_types_never_becomes_a_control_token(directory: Path) -> None:
    ours = Tokenizer.from_directory(directory)
    assert ours.control_ids
    for control in CONTROL_TEXTS:
        for text in (
            control,
            f"a{control}b",
            control * 3,
            f" {control}\n",
            control[:3] + control,
            control + " " + control,
        ):
            ids = ours.encode(text, add_special_tokens=False)
            assert not ours.control_ids.intersection(ids), text
            assert ours.decode(ids).strip() == text.strip()


def test_a_control_token_inside_the_models_own_vocabulary_is_cut() -> None:
    """A vocabulary may build a control token by merges; plain encoding would then yield it."""
    vocabulary = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "a": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("<", "s"), ("<s", ">")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    ours = Tokenizer(backend, {}, None)
    assert ours.control_ids == {4}
    for text in ("<s>", "a<s>a", "<s><s>", "<<s>>"):
        ids = ours.encode(text)
        assert 4 not in ids
        assert ours.decode(ids) == text


@pytest.mark.parametrize("text", ["a" * 300_000, " " * 300_000, "<s_" * 100_000, "\ud800abc", "\x00", "\ufdd0x"])
def test_hostile_text_is_encoded_in_linear_time(tmp_path: Path, text: str) -> None:
    ours = Tokenizer.from_directory(byte_level(tmp_path))
    ids = ours.encode(text)
    assert ids
    assert ours.decode(ids[1:]) == text.replace("\ud800", "\ufffd").replace("\ufdd0", "")


def test_every_character_survives_a_round_trip(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(byte_level(tmp_path))
    unassigned = range(0x40000, 0xE0000)  # ten planes: one code in 64
    codes = [
        *range(0xD800),
        *range(0xE000, 0xFDD0),
        *range(0xFDD3, 0x40000),
        *unassigned[::64],
        *range(0xE0000, 0x110000),
    ]
    for start in range(0, len(codes), 50_000):
        text = "".join(map(chr, codes[start : start + 50_000]))
        ids = ours.encode(text, add_special_tokens=False)
        stream = ours.detokenizer()
        streamed = "".join(map(stream.push, ids)) + stream.finish()
        assert streamed == text


def test_streaming_gives_what_decoding_all_gives(directory: Path) -> None:
    ours = Tokenizer.from_directory(directory)
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(1500):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randint(0, 12))]
        stream = ours.detokenizer()
        pieces = [stream.push(token_id) for token_id in ids] + [stream.finish()]
        assert "".join(pieces) == ours.decode(ids)
        expected = theirs.decode(ids, skip_special_tokens=True)
        if "\ufffd" not in expected:  # how many stand-ins an invalid sequence gets is a matter of taste
            assert ours.decode(ids) == expected, ids
    for text in random_texts(300):
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text


def test_no_piece_ends_inside_a_character(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(byte_level(tmp_path))
    stream = ours.detokenizer()
    pieces = [stream.push(token_id) for token_id in ours.encode("né 北京 🎉👩‍👩‍👧!", add_special_tokens=False)]
    assert "\ufffd" not in "".join(pieces)
    assert stream.finish() == ""


def test_a_character_that_the_prompt_began_comes_out_once(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(byte_level(tmp_path))
    ids = ours.encode("x🎉", add_special_tokens=False)
    for cut in range(1, len(ids)):
        stream = ours.detokenizer(ids[:cut])
        text = "".join(map(stream.push, ids[cut:])) + stream.finish()
        assert text in ("🎉", "")  # "" where the prompt held all of it
    stream = ours.detokenizer(ids[:-1])
    assert stream.push(ids[-1]) == "🎉"


def test_text_that_goes_on_from_a_prompt_keeps_its_first_space(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(sentencepiece(tmp_path))
    ids = ours.encode("hello world", add_special_tokens=False)
    assert ours.decode(ids) == "hello world"
    stream = ours.detokenizer(ours.encode("well"))
    assert "".join(map(stream.push, ids)) + stream.finish() == " hello world"


def test_saved_and_read_again_it_is_the_same(directory: Path, tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(directory)
    copy = tmp_path / "copy"
    copy.mkdir()
    ours.save(copy)
    again = Tokenizer.from_directory(copy)
    assert again.control_ids == ours.control_ids
    assert (again.bos_token_id, again.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
    assert again.bos_token_id is not None
    for text in [*TEXTS, *CONTROL_TEXTS]:
        assert again.encode(text) == ours.encode(text)


def test_token_texts_are_for_displays(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(byte_level(tmp_path))
    assert ours.bos_token_id is not None
    assert ours.token_text(ours.bos_token_id) == "<|begin_of_text|>"
    shown = [ours.token_text(token_id) for token_id in ours.encode("é🎉", add_special_tokens=False)]
    assert all(text.isprintable() for text in shown)


def test_thoughts_are_still_shown_after_saving(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(byte_level(tmp_path))
    copy = tmp_path / "copy"
    copy.mkdir()
    ours.save(copy)
    think = [i for i in ours.control_ids if ours.token_text(i) == "<think>"]
    assert ours.decode(think) == Tokenizer.from_directory(copy).decode(think) == "<think>"


def test_a_prompt_without_text_leaves_the_first_space_to_be_stripped(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(sentencepiece(tmp_path))
    ids = ours.encode("hello", add_special_tokens=False)
    stream = ours.detokenizer([1])
    assert "".join(map(stream.push, ids)) + stream.finish() == "hello"
    stream = ours.detokenizer()
    assert stream.push(-1) == stream.push(10**9) == ""


def test_a_character_waits_through_special_tokens(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(byte_level(tmp_path))
    ids = [ours.bos_token_id or 0] + [i for byte in "🎉".encode() for i in [_token_of(ours, byte)]]
    stream = ours.detokenizer(ids[:3] + [ours.bos_token_id or 0] * 6)
    assert "".join(map(stream.push, ids[3:])) == "🎉"


def _token_of(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def test_unusable_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ 1 }}")
    assert Tokenizer.from_directory(tmp_path).has_chat_template
    huge = tokenizers.Tokenizer(models.BPE(vocab={"a": 300_000_000}, merges=[]))
    with pytest.raises(WeightsError, match="beyond any vocabulary"):
        Tokenizer(huge, {}, None)
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(WeightsError, match="WordPiece"):
        Tokenizer(backend, {}, None)
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer(backend, {}, None).apply_chat_template([{"role": "user", "content": "hi"}])


def test_text_that_is_trusted_may_spell_control_tokens(directory: Path) -> None:
    ours = Tokenizer.from_directory(directory)
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    spelled = [theirs.id_to_token(i) or "" for i in sorted(ours.control_ids)]
    assert spelled
    rng = random.Random(3)
    for text in [*TEXTS, *CONTROL_TEXTS, *random_texts(300)]:
        text = rng.choice(spelled) + text + rng.choice(spelled)
        parsed = ours.encode(text, parse_special=True)
        assert parsed == theirs.encode(text).ids
        assert len(ours.control_ids.intersection(parsed)) >= 1
        assert ours.encode(text, add_special_tokens=False, parse_special=True) == parsed[1:]
        assert not ours.control_ids.intersection(ours.encode(text, add_special_tokens=False))


def with_pad(directory: Path, *tokens: AddedToken) -> tuple[Path, int]:
    """A tokenizer to which tokens were added, and the rows that the model had before."""
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    rows = backend.get_vocab_size(with_added_tokens=True)
    backend.add_tokens(list(tokens))
    backend.save(str(path))
    return directory, rows


def test_tokens_that_were_added_without_rows_cannot_be_had(tmp_path: Path) -> None:
    pad, word = AddedToken("<pad>", special=True), AddedToken("zugzwang", special=False)
    directory, rows = with_pad(byte_level(tmp_path, template="{{ messages[0]['content'] }}"), pad, word)
    ours = Tokenizer.load(directory, rows)
    assert ours is not None
    assert ours.vocab_size == rows + 2
    for text in [*TEXTS, "<pad>", "a <pad> b"]:
        assert max(ours.encode(text)) < rows
    for refused, options in (("a zugzwang", {}), ("<pad>", {"parse_special": True})):
        with pytest.raises(UsageError, match="no embedding for the token") as caught:
            ours.encode(refused, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="zugzwang"):
        ours.apply_chat_template([{"role": "user", "content": "a zugzwang"}])


def test_an_end_token_without_a_row_is_none(tmp_path: Path) -> None:
    directory, rows = with_pad(byte_level(tmp_path), AddedToken("<end>", special=True))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<end>"}))
    assert Tokenizer.from_directory(directory).eos_token_id == rows
    assert Tokenizer.from_directory(directory, rows).eos_token_id is None


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    directory, rows = with_pad(byte_level(tmp_path))
    with pytest.raises(WeightsError, match="belong to different models"):
        Tokenizer.from_directory(directory, rows - 5)  # entries of its own vocabulary, and not added ones
    many = [AddedToken(f"<{i}>", special=True) for i in range(2000)]
    with_pad(directory, *many)
    with pytest.raises(WeightsError, match="belong to different models"):
        Tokenizer.from_directory(directory, rows)


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path, 100) is None
    assert Tokenizer.load({}, 100) is None
    assert Tokenizer.load({"tokenizer.ggml.model": "no_vocab"}, 100) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, 100)


def test_a_control_token_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_tokens, "Spellings", None)  # it would take gigabytes
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<" + "x" * 100_000 + ">", special=True)])
    with pytest.raises(WeightsError, match="100002 characters"):
        Tokenizer(backend, {}, None)


def test_byte_tokens_that_are_no_character_become_stand_ins_alone(tmp_path: Path) -> None:
    """This differs from transformers on purpose: see the module's docstring."""
    ours = Tokenizer.from_directory(sentencepiece(tmp_path))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [_token_of(ours, byte) for byte in (0xC3, 0xA9, 0xFF)]
    assert ours.decode(ids) == "é\ufffd"
    assert theirs.decode(ids) == "\ufffd\ufffd\ufffd"


def test_a_prompt_without_end_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(byte_level(tmp_path))
    longest = max(len(ours._texts[i]) for i in range(ours.vocab_size))
    ours.check_length("x" * 100 * longest, 100)
    with pytest.raises(UsageError, match="are allowed: the context holds 100 tokens"):
        ours.check_length("x" * (100 * longest + 1), 100)
    with pytest.raises(UsageError, match="at most 16,777,216 are allowed"):
        ours.check_length(" " * (17 << 20), 1 << 30)
