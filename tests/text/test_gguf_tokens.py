"""Special tokens of GGUF files, by llama.cpp's rules; and against llama.cpp itself where it is installed."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

import gguf
import pytest

import minillm
from minillm.text.gguf_tokens import end_ids, special_ids
from minillm.text.pre_tokenizers import SPLITS
from minillm.text.reading import Values
from minillm.text.tokenizer import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
LETTERS = [*"▁thenris.,!?'0123456789", "▁t", "he", "▁the", "in", "er"]


def byte_level(extra: dict[str, int], pre: str = "llama-bpe", **keys: Any) -> dict[str, Any]:
    """Metadata of a small byte-level vocabulary that ends with ``extra``, texts and their kinds."""
    shown = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = [chr(byte) for byte in shown] + [chr(256 + i) for i in range(256 - len(shown))]
    words = ["Ġt", "he", "Ġthe", "in", "er"]
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*names, *words, *extra],
        "token_type": [NORMAL] * (len(names) + len(words)) + list(extra.values()),
        "merges": ["Ġ t", "h e", "Ġt he", "i n", "e r"],
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def sentencepiece(extra: dict[str, int], **keys: Any) -> dict[str, Any]:
    """Metadata of a small SentencePiece vocabulary that ends with ``extra``."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *extra]
    scores = [0.0] * 259 + [-float(i) for i in range(len(LETTERS))] + [-99.0] * len(extra)
    kinds = [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(LETTERS), *extra.values()]
    found = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def ends_of(metadata: dict[str, Any]) -> set[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {tokens[each] for each in end_ids(Values("m", metadata), len(tokens))}


def id_of(metadata: dict[str, Any], text: str) -> int:
    return int(metadata["tokenizer.ggml.tokens"].index(text))


CHATML = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
# Special tokens of the models in weights.toml, and the ends that generation_config.json, config.json and
# tokenizer_config.json of the whole models name. The first of the ends is the one that GGUF files name.
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")
SMOLLM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>")
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
NAMED = {
    "smollm2": (SMOLLM, ("<|im_end|>",)),
    "tinyllama": ((), ("</s>",)),
    "llama": (LLAMA, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    "deepseek-r1-llama": (DEEPSEEK, ("<｜end▁of▁sentence｜>",)),
    "mistral": (("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ("</s>",)),
}


def test_quantizations_of_a_named_model_end_where_the_whole_model_does() -> None:
    models = tomllib.loads((Path(minillm.__file__).parents[1] / "weights.toml").read_text())["models"]
    for name in models:
        special, ends = next(facts for family, facts in NAMED.items() if name.startswith(family))
        whole = sentencepiece if ends == ("</s>",) else byte_level
        metadata = whole(dict.fromkeys(special, CONTROL))
        metadata["tokenizer.ggml.eos_token_id"] = id_of(metadata, ends[0])
        assert set(ends) <= ends_of(metadata), name
        # Others are ends of other models with this vocabulary: a whole answer never holds them.
        others = {"<|endoftext|>", "<reponame>", "<|eom_id|>", "<|eot_id|>"}
        assert ends_of(metadata) <= {*ends, *others}, name


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, UNUSED])
def test_an_end_is_a_control_token_of_whatever_kind_it_is_said_to_be(kind: int) -> None:
    metadata = byte_level({**CHATML, "<|im_end|>": kind}, pre="qwen2")
    ours, end = Tokenizer.from_gguf(metadata), id_of(metadata, "<|im_end|>")
    assert ours.encode("hi<|im_end|>", parse_special=True)[-1] == end
    assert end in ours.control_ids
    assert ours.decode([end]) == ""


def test_harmony_messages_end_without_the_answer() -> None:
    texts = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
    metadata = byte_level(dict.fromkeys(texts, CONTROL))
    assert ends_of(metadata) == {"<|return|>", "<|call|>", "<|endoftext|>"}
    shown = Tokenizer.from_gguf(metadata).decode([id_of(metadata, text) for text in texts])
    assert shown == "<|start|><|channel|><|message|><|end|>"
    assert "<|end|>" in ends_of(byte_level({"<|end|>": CONTROL}))


def test_a_key_names_the_token_of_a_gap() -> None:
    texts = {"<|fim_pad|>": CONTROL, "<|file_sep|>": CONTROL, "<pad>": CONTROL}
    metadata = byte_level(texts)
    assert ends_of(metadata) == {"<|fim_pad|>", "<|file_sep|>"}
    metadata["tokenizer.ggml.fim_pad_token_id"] = id_of(metadata, "<pad>")
    assert ends_of(metadata) == {"<pad>", "<|file_sep|>"}


def test_ends_without_a_row_of_the_embedding_are_dropped() -> None:
    metadata = byte_level(CHATML, eos_token_id=263)
    values, rows = Values("m", metadata), len(metadata["tokenizer.ggml.tokens"]) - 1
    assert end_ids(values, rows) == [261]
    assert end_ids(Values("m", {"tokenizer.ggml.eos_token_id": 3}), 4) == [3], "a file without tokens"


@pytest.mark.parametrize("wrong", [None, -1, 4294967295, 99_999])
def test_sentencepiece_has_bos_1_and_eos_2_unless_a_key_names_others(wrong: int | None) -> None:
    metadata = sentencepiece({}, bos_token_id=wrong, eos_token_id=wrong, unknown_token_id=wrong)
    assert special_ids(Values("m", metadata), 300) == {"bos": 1, "eos": 2, "unknown": 0}
    ours = Tokenizer.from_gguf(metadata)
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.encode("the") == [1, id_of(metadata, "▁the")]
    metadata = sentencepiece({"<bos>": CONTROL, "<eos>": CONTROL})
    metadata |= {f"tokenizer.ggml.{name}_token_id": id_of(metadata, f"<{name}>") for name in ("bos", "eos")}
    ours = Tokenizer.from_gguf(metadata)
    assert (ours.token_text(ours.bos_token_id or 0), ours.token_text(ours.eos_token_id or 0)) == ("<bos>", "<eos>")


def test_damage_that_changes_no_id_is_repaired() -> None:
    whole = Tokenizer.from_gguf(sentencepiece({}))
    metadata = sentencepiece({})
    metadata["tokenizer.ggml.tokens"] += ["", ""]
    metadata["tokenizer.ggml.token_type"] += [NORMAL] * 3
    metadata["tokenizer.ggml.scores"] += [-1.0] * 3
    ours = Tokenizer.from_gguf(metadata)
    assert ours.token_text(len(whole._texts)) == f"[EMPTY_{len(whole._texts)}]"
    for found in (ours, Tokenizer.from_gguf(sentencepiece({}, scores=None))):
        assert found.encode("the hen in the inn") == whole.encode("the hen in the inn")
    metadata = byte_level({}, merges=["Ġ t", "h e", "q z", "foo bar", "oneword", " x", "Ġt he", "i n", "e r"])
    assert Tokenizer.from_gguf(metadata).encode("then the qz") == Tokenizer.from_gguf(byte_level({})).encode(
        "then the qz"
    )


def written(metadata: dict[str, Any], path: Path) -> Path:
    """A GGUF file of a vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        adders = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        adders[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class LlamaCpp:
    """A vocabulary in llama.cpp."""

    def __init__(self, path: Path) -> None:
        package = pytest.importorskip("llama_cpp")
        self._quiet = package.llama_log_callback(lambda level, text, data: None)
        package.llama_log_set(self._quiet, None)
        params = package.llama_model_default_params()
        params.vocab_only = True
        self._api, self._model = package, package.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, "llama.cpp refuses the file"
        self._vocabulary = package.llama_model_get_vocab(self._model)

    def close(self) -> None:
        self._api.llama_model_free(self._model)

    def ids(self, kind: str) -> set[int]:
        count, asked = self._api.llama_vocab_n_tokens(self._vocabulary), getattr(self._api, f"llama_vocab_is_{kind}")
        return {token_id for token_id in range(count) if asked(self._vocabulary, token_id)}

    def named(self, name: str) -> int:
        return int(getattr(self._api, f"llama_vocab_{name}")(self._vocabulary))

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        found = (self._api.llama_token * (len(data) + 8))()
        return list(found[: self._api.llama_tokenize(self._vocabulary, data, len(data), found, len(found), True, True)])


TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<|fim_prefix|>", "<|channel|>", "<|im_start|>", "<|user|>"),
)


def test_special_tokens_are_llama_cpps(tmp_path: Path) -> None:
    rng = random.Random(3)
    for number in range(24):
        extra = {text: rng.choice((NORMAL, CONTROL, USER_DEFINED, UNUSED)) for text in rng.sample(TEXTS, 6)}
        make = (sentencepiece, byte_level)[number % 2]
        metadata = make(extra)
        count = len(metadata["tokenizer.ggml.tokens"])
        for name in ("eos", "eot", "fim_pad") if number % 2 else rng.sample(("bos", "eos", "eot", "unknown"), 2):
            metadata[f"tokenizer.ggml.{name}_token_id"] = rng.choice((count - 1, count - 2, 1, (1 << 32) - 1))
        if number % 2:  # without a key, byte-level vocabularies have token 11
            metadata["tokenizer.ggml.eos_token_id"] = count - 3
            metadata["tokenizer.ggml.bos_token_id"] = count - 4
        theirs, ours = LlamaCpp(written(metadata, tmp_path / f"{number}.gguf")), Tokenizer.from_gguf(metadata)
        assert set(end_ids(Values("m", metadata), count)) == theirs.ids("eog"), metadata
        control = {each for each, token in ours._backend.get_added_tokens_decoder().items() if token.special and each}
        assert control == theirs.ids("control"), metadata
        assert (ours.bos_token_id, ours.eos_token_id) == (theirs.named("bos"), theirs.named("eos"))
        for text in ("the hen in the inn", "".join(extra), f" the{''.join(extra)} hen"):
            assert ours.encode(text, parse_special=True) == theirs.encode(text), (text, metadata)
        theirs.close()


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_splits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    """Words of letters, digits, marks and white space; merges make each cut visible in the ids."""
    rng = random.Random(name)
    metadata = byte_level({"<s>": CONTROL}, pre=name)
    alphabet = metadata["tokenizer.ggml.tokens"][:256]
    merges = {
        f"{left} {right}": left + right for left in (*"the1'.,!", "Ġ", "Ċ", "č") for right in (*"the1'.,!", "Ġ", "Ċ")
    }
    metadata["tokenizer.ggml.tokens"] = [*alphabet, *merges.values(), "Ġthe", "<s>"]
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * (256 + len(merges) + 1) + [CONTROL]
    metadata["tokenizer.ggml.merges"] = [*merges, "Ġt he"]
    metadata["tokenizer.ggml.bos_token_id"] = 256 + len(merges) + 1
    try:
        theirs = LlamaCpp(written(metadata, tmp_path / "m.gguf"))
    except AssertionError:
        pytest.skip("this version of llama.cpp does not know the name")
    ours = Tokenizer.from_gguf(metadata)
    for _ in range(300):
        text = "".join(rng.choice("the THE111' '.,!  \n\r\té北") for _ in range(rng.randint(1, 20)))
        assert ours.encode(text) == theirs.encode(text), repr(text)
    theirs.close()
