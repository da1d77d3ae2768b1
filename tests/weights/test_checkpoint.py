"""Test checkpoints: the tensors read are those written, and damage gives an error that names it."""

from __future__ import annotations

import json
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.engine import logits_in_chunks
from lib.gguf_files import gguf_model, write_gguf
from lib.models import hf_model
from minillm.config import EngineConfig
from minillm.errors import WeightsError
from minillm.loading.engine import load_engine
from minillm.model.config import ModelConfig
from minillm.model.loader import load_llama
from minillm.weights.checkpoint import open_checkpoint
from minillm.weights.files import ModelFiles
from minillm.weights.gguf_file import GGUFCheckpoint
from minillm.weights.package import convert
from minillm.weights.stored import read_stored


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model as transformers saves it."""
    directory = tmp_path_factory.mktemp("model")
    hf_model(hidden_size=96, intermediate_size=256, num_attention_heads=3, num_key_value_heads=1).save_pretrained(
        directory
    )
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "sharded"
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(saved).save_pretrained(directory, max_shard_size="200KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def open_files(path: Path) -> Any:
    return open_checkpoint(ModelFiles("x", path, "test"))


def test_every_tensor_is_read_back_bitwise(saved: Path, sharded: Path) -> None:
    exact = load_file(saved / "model.safetensors")
    for directory in (saved, sharded):
        checkpoint = open_files(directory)
        assert set(checkpoint.names()) == set(exact)
        for name, tensor in exact.items():
            assert torch.equal(checkpoint.tensor(name), tensor)
            assert checkpoint.shape(name) == tuple(tensor.shape)
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(checkpoint.tensor(name, slice(3, 9)), exact[name][3:9])
        assert torch.equal(checkpoint.tensor(name, None, slice(5, 7)), exact[name][:, 5:7])


def test_a_sharded_model_computes_what_the_single_file_does(saved: Path, sharded: Path) -> None:
    results = []
    for directory in (saved, sharded):
        checkpoint = open_files(directory)
        config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        model = load_llama(checkpoint, config, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
        results.append(logits_in_chunks(model, [3, 5, 7, 9], [4]))
    assert torch.equal(*results)


def test_every_missing_or_damaged_shard_is_named(sharded: Path) -> None:
    for shard in sorted(sharded.glob("*.safetensors")):
        data = shard.read_bytes()
        shard.unlink()
        with pytest.raises(WeightsError, match=f"{shard.name} is missing"):
            open_files(sharded)
        for damaged, said in (
            (b"", "empty"),
            (data[: len(data) // 2], "cut short|incomplete|metadata|Header|header"),
            (b"<!DOCTYPE html><html>not found</html>", "web page"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs"),
            (b"PK\x03\x04" + b"\0" * 200, "pickled"),
            (b"\x10" + b"\0" * 7 + b"not json at all!" + b"\0" * 10, "header"),
        ):
            shard.write_bytes(damaged)
            with pytest.raises(WeightsError, match=said) as caught:
                open_files(sharded)
            assert shard.name in str(caught.value)
            assert "\n" not in str(caught.value)
        shard.write_bytes(data)
    open_files(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, shards = "model.norm.weight", sorted(set(index["weight_map"].values()))
    index["weight_map"][name] = next(shard for shard in shards if shard != index["weight_map"][name])
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        open_files(sharded)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_an_index_may_name_what_a_model_needs_no_tensor_for(sharded: Path, name: str) -> None:
    path, config = sharded / "model.safetensors.index.json", json.loads((sharded / "config.json").read_text())
    index = json.loads(path.read_text())
    index["weight_map"][name] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    (sharded / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    for shard in sharded.glob("*.safetensors"):
        save_file({key: value for key, value in load_file(shard).items() if key != name}, shard)
    checkpoint = open_files(sharded)
    config = ModelConfig.from_hf(checkpoint.config)
    load_llama(checkpoint, config, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
    if name == "lm_head.weight":
        config = replace(config, tie_word_embeddings=False)
        with pytest.raises(WeightsError, match=r"no tensor lm_head\.weight"):
            load_llama(checkpoint, config, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x\0y", 5, None])
def test_an_index_stays_inside_its_directory(copy: Path, name: Any) -> None:
    secret = copy.parent / "secret.safetensors"
    shutil.copy(copy / "model.safetensors", secret)
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(WeightsError, match="not a file name"):
        open_files(copy)


def test_a_tensor_stored_twice_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "a.safetensors")
    open_files(copy)
    save_file({"lm_head.weight": torch.ones(1)}, copy / "b.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight is both in"):
        open_files(copy)


def test_pickles_are_never_opened(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        open_files(copy)
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    with pytest.raises(WeightsError, match="pickled"):
        open_files(copy)


def test_other_dtypes_are_refused_by_name(copy: Path) -> None:
    save_file({"x": torch.ones(2, dtype=torch.float8_e4m3fn)}, copy / "model.safetensors")
    with pytest.raises(WeightsError, match="F8_E4M3"):
        open_files(copy)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "\xff", "[" * 5000], ids=lambda text: text[:8])
def test_a_damaged_config_is_said(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(WeightsError, match=r"config\.json"):
        open_files(copy)


def test_a_directory_that_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json is missing"):
        open_files(tmp_path)


@pytest.mark.parametrize("has_config", [False, True])
def test_a_lora_adapter_is_named(tmp_path: Path, has_config: bool) -> None:
    save_file({"base_model.model.lora_A.weight": torch.ones(4, 8)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if has_config:
        (tmp_path / "config.json").write_text("{}")
    for attempt in (open_files, read_stored):
        with pytest.raises(WeightsError, match="is a LoRA adapter"):
            attempt(tmp_path)


def test_an_adapter_beside_its_base_model_is_passed_over(copy: Path) -> None:
    save_file({"base_model.model.lora_A.weight": torch.ones(4, 8)}, copy / "adapter_model.safetensors")
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    assert not any("lora" in name for name in open_files(copy).names())


def test_an_architecture_is_checked_before_the_weights(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["GemmaForCausalLM"]}))
    (copy / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(WeightsError, match="'GemmaForCausalLM' is not supported"):
        open_files(copy)


# --- GGUF -------------------------------------------------------------------------------------------------------------


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_tensors_are_what_the_library_dequantizes(tmp_path: Path, kind: str) -> None:
    model = gguf_model()
    exact = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType[kind])
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert set(checkpoint.names()) == set(exact)
    for name, values in exact.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), values), name
    if kind == "F32":
        for name, tensor in model.state_dict().items():
            assert torch.equal(checkpoint.tensor(name), tensor), f"{name} is not undone bit for bit"
    name = "model.layers.0.self_attn.k_proj.weight"
    assert np.array_equal(checkpoint.tensor(name, slice(5, 9)).numpy(), exact[name][5:9])


def test_a_converted_gguf_file_has_its_matrices_in_float16(tmp_path: Path) -> None:
    exact = write_gguf(tmp_path / "m.gguf", gguf_model(), gguf.GGMLQuantizationType.Q4_1)
    directory = tmp_path / "converted"
    directory.mkdir()
    records = convert(tmp_path / "m.gguf", directory, lambda progress: None)
    assert {record.name for record in records} == {path.name for path in directory.iterdir()}
    tensors = load_file(directory / "model.safetensors")
    assert set(tensors) == set(exact)
    for name, values in exact.items():
        expected = torch.from_numpy(values.copy())
        assert torch.equal(tensors[name], expected.half() if expected.dim() == 2 else expected), name


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q3_K", "IQ4_XS"])
def test_k_quants_are_read(tmp_path: Path, kind: str) -> None:
    """The library quantizes none of these, so the bytes are random: any bytes are a valid tensor."""
    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 60, (4, 2 * size), dtype=np.uint8)
    model = gguf_model(num_hidden_layers=1)
    write_gguf(tmp_path / "base.gguf", model, gguf.GGMLQuantizationType.F16)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for field in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{field}")(2 * block if field == "embedding_length" else 1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    expected = gguf.quants.dequantize(raw, type_)
    assert checkpoint.shape("model.embed_tokens.weight") == (4, 2 * block)
    assert np.array_equal(checkpoint.tensor("model.embed_tokens.weight").numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_model_computes_what_transformers_computes(tmp_path: Path, tied: bool) -> None:
    model = gguf_model(tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F32)
    engine = load_engine(str(tmp_path / "m.gguf"), EngineConfig(device="cpu", num_blocks=16))
    tokens = [3, 14, 15, 92, 65, 35]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    got = logits_in_chunks(engine.runner.model, tokens, [6])
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


def test_rope_scaling_is_read_from_gguf(tmp_path: Path) -> None:
    model = gguf_model(num_hidden_layers=1)
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F32, **scaling)
    rope = ModelConfig.from_hf(GGUFCheckpoint(tmp_path / "m.gguf").config).rope
    assert (rope.type, rope.factor) == ("yarn", 4.0)
    writer_path = tmp_path / "unknown.gguf"
    write_gguf(writer_path, model, gguf.GGMLQuantizationType.F32, **{"llama.rope.scaling.type": "longrope"})
    with pytest.raises(WeightsError, match="longrope"):
        GGUFCheckpoint(writer_path)


def test_unsupported_gguf_models_are_refused_by_name(tmp_path: Path) -> None:
    model = gguf_model(num_hidden_layers=1)
    write_gguf(tmp_path / "moe.gguf", model, gguf.GGMLQuantizationType.F32, **{"llama.expert_count": 8})
    with pytest.raises(WeightsError, match="expert_count"):
        GGUFCheckpoint(tmp_path / "moe.gguf")
    write_gguf(tmp_path / "partial.gguf", model, gguf.GGMLQuantizationType.F32, **{"llama.rope.dimension_count": 16})
    with pytest.raises(WeightsError, match="16 of 32 dimensions"):
        GGUFCheckpoint(tmp_path / "partial.gguf")
    write_gguf(tmp_path / "lora.gguf", model, gguf.GGMLQuantizationType.F32, **{"general.type": "adapter"})
    with pytest.raises(WeightsError, match="LoRA adapter"):
        GGUFCheckpoint(tmp_path / "lora.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "qwen3moe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"'qwen3moe' is not supported; supported: 'llama', 'qwen2'"):
        GGUFCheckpoint(tmp_path / "other.gguf")


def attempt(path: Path, data: bytes) -> str | None:
    """Open ``data`` as a GGUF checkpoint and read all of it. Returns None, or the line that refused it."""
    path.write_bytes(data)
    try:
        checkpoint = GGUFCheckpoint(path)
        for name in checkpoint.names():
            checkpoint.tensor(name)
        ModelConfig.from_hf(checkpoint.config)
    except WeightsError as error:
        refusal = str(error)
    else:
        return None
    assert "\n" not in refusal
    return refusal


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    model = gguf_model(num_hidden_layers=1, vocab_size=40)
    write_gguf(path, model, gguf.GGMLQuantizationType.Q8_0)
    return path.read_bytes()


def test_a_gguf_file_cut_anywhere_is_refused(tmp_path: Path, small_gguf: bytes) -> None:
    rng = random.Random(0)
    cuts = [*range(64), *rng.sample(range(len(small_gguf) - 32), 200), len(small_gguf) - 40]
    for cut in cuts:
        assert attempt(tmp_path / "cut.gguf", small_gguf[:cut]) is not None, cut
    assert attempt(tmp_path / "whole.gguf", small_gguf) is None


def test_random_damage_in_a_gguf_header_never_hangs_or_crashes(tmp_path: Path, small_gguf: bytes) -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(400):
        data = bytearray(small_gguf)
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(2500)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        try:
            refused += attempt(tmp_path / "m.gguf", bytes(data)) is not None
        except (UnicodeEncodeError, MemoryError) as error:  # pragma: no cover
            pytest.fail(f"{type(error).__name__} escaped")
    assert refused > 100


def header(version: int = 3, tensors: int = 0, pairs: int = 0, body: bytes = b"", magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"GGUF", "ends"),
        (header(magic=b"GGML"), "begins with"),
        (header(version=1), "version 1"),
        (header(version=99), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=1 << 60), "do not fit"),
        (header(pairs=1 << 60), "do not fit"),
        (header(pairs=1, body=struct.pack("<Q", 1 << 62) + b"x" * 40), "a string of"),
        (header(pairs=1, body=text("a") + struct.pack("<I", 77) + b"x" * 40), "unknown type 77"),
        (header(pairs=1, body=text("a") + struct.pack("<IIQ", 9, 4, 1 << 61) + b"x" * 40), "do not fit"),
        (header(pairs=1, body=text("a") + struct.pack("<IIQ", 9, 8, 1 << 61) + b"x" * 40), "do not fit"),
        (header(pairs=1, body=text("a") + struct.pack("<IIQ", 9, 9, 3) + b"x" * 40), "array of the unsupported type 9"),
        (header(pairs=2, body=(text("a") + struct.pack("<IB", 0, 1)) * 2 + b"x" * 40), "occurs twice"),
        (header(pairs=1, body=text("general.alignment") + struct.pack("<II", 4, 24) + b"x" * 40), "power of two"),
        (header(pairs=1, body=text("general.alignment") + struct.pack("<II", 4, 0) + b"x" * 40), "power of two"),
        (header(tensors=1, body=text("t") + struct.pack("<I", 9) + b"x" * 40), "9 dimensions"),
        (
            header(tensors=1, body=text("t") + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0) + b"x" * 40),
            "larger than",
        ),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 0, 0, 0) + b"x" * 40), "larger than"),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 4, 0, 1 << 62) + b"x" * 40), "outside the file"),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 4, 0, 3) + b"x" * 40), "outside the file"),
        (header(tensors=2, body=(text("t") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2 + b"x" * 80), "occurs twice"),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 4, 250, 0) + b"x" * 80), "unknown type number 250"),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 7, 8, 0) + b"x" * 80), "not a multiple of 32"),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 64, 0, 0) + b"x" * 80), "cut short"),
    ],
)
def test_each_malformed_gguf_is_refused_with_its_cause(tmp_path: Path, data: bytes, said: str) -> None:
    refusal = attempt(tmp_path / "m.gguf", data)
    assert refusal is not None
    assert said in refusal
