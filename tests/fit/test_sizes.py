"""Test the bytes computed from headers: against loaded models, published sizes, and false headers."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import gguf
import pytest
import torch

from lib.checkpoints import LLAMA_1B, LLAMA_8B, awq_tensors, forge_gguf, forge_hf, hf_tensors
from lib.gguf_files import gguf_model, write_gguf
from lib.models import hf_model, needs_products_of_8_bits
from minillm.errors import WeightsError
from minillm.fit.sizes import quantized, sized, sized_entry
from minillm.fit.weights import Layout, expected_tensors, weights_in_memory
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import load_llama
from minillm.storage import Storage
from minillm.weights.checkpoint import open_checkpoint
from minillm.weights.files import ModelFiles
from minillm.weights.manifest import load_manifest
from minillm.weights.stored import BLOCKS, GGML_TYPES, LOW_BIT, StoredTensor, read_stored

GPU, CPU = Layout(2), Layout(4, packs=True)


def loaded(path: Path, dtype: torch.dtype) -> Llama:
    checkpoint = open_checkpoint(ModelFiles("x", path, "test"))
    config = ModelConfig.from_hf(checkpoint.config)
    return load_llama(checkpoint, config, device=torch.device("cpu"), dtype=dtype, max_positions=8)


def bytes_of(model: Llama) -> int:
    """Return the bytes of a loaded model without its rotary tables."""
    total = model.embedding.nbytes + model.norm.nbytes
    for layer in model.layers:
        total += sum(norm.nbytes for norm in (layer.input_norm, layer.post_attention_norm) if norm is not None)
        total += sum(linear.num_bytes for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))
    assert isinstance(model.embedding, torch.Tensor)
    shared = model.head.weight.data_ptr() == model.embedding.data_ptr()
    return total + (0 if shared else model.head.num_bytes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [96, 6000])  # a small head in float32 has no layout of its own
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_the_loaded_model(
    tmp_path: Path, tied: bool, vocab: int, stored: torch.dtype, dtype: torch.dtype
) -> None:
    hf_model(tie_word_embeddings=tied, vocab_size=vocab).to(stored).save_pretrained(tmp_path)
    model = loaded(tmp_path, dtype)
    layout = Layout(dtype.itemsize, packs=dtype == torch.float32)
    weights = weights_in_memory(read_stored(tmp_path).tensors, layout)
    has_copy = layout.packs and (vocab == 6000 or stored != torch.float32)
    table = 0 if tied and not has_copy else model.embedding.nbytes
    assert weights.read == bytes_of(model) - table
    if not layout.packs or stored == torch.float32:  # which FBGEMM does not pad
        assert weights.memory == bytes_of(model)


PACKING = """
import re, sys
from pathlib import Path
import torch
from minillm.kernels import LinearWeight
from minillm.system import compact_heap

def anonymous() -> int:
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def packed(weight, held):
    if held == "expanded":
        return LinearWeight(weight)
    linear = LinearWeight.in_8_bits(lambda: weight.__getitem__, tuple(weight.shape), None)
    linear.packed.apply(torch.randn(64, weight.shape[1]))
    return linear

rows, columns, count, held = *map(int, sys.argv[1:4]), sys.argv[4]
with compact_heap() as trim:
    kept = [packed(torch.randn(rows, columns).bfloat16().float(), held)]
    trim()
    before = anonymous()
    for _ in range(count):
        kept.append(packed(torch.randn(rows, columns).bfloat16().float(), held))
        trim()
    print(anonymous() - before)
"""


@needs_products_of_8_bits
@pytest.mark.parametrize("storage", ["expanded", "int8"])
@pytest.mark.parametrize("shape", [(3072, 576), (576, 1536), (1000, 2000)])
def test_packed_matrices_take_the_memory_that_is_stated(
    minillm_command: tuple[str, ...], shape: tuple[int, int], storage: Storage
) -> None:
    count = 16
    command = [*minillm_command, "-c", PACKING, *map(str, (*shape, count)), storage]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    matrix = StoredTensor("model.layers.0.mlp.up_proj.weight", shape, "BF16")
    stated = weights_in_memory([matrix], Layout(4, packs=True, storage=storage)).memory * count
    assert stated == pytest.approx(
        taken, rel=0.1 if storage == "expanded" else 0.2
    )  # FBGEMM chooses blocks by processor


def test_the_headers_agree_with_the_checkpoints(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    write_gguf(tmp_path / "m.gguf", gguf_model(), gguf.GGMLQuantizationType.Q4_1)
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        checkpoint, model = open_checkpoint(ModelFiles("x", path, "test")), sized("x", path)
        by_header = sorted((tensor.shape, tensor.kind) for tensor in model.tensors)
        assert by_header == sorted((checkpoint.shape(name), checkpoint.stored_as(name)) for name in checkpoint.names())
        config = ModelConfig.from_hf(checkpoint.config)
        assert (model.shape.layers, model.shape.heads, model.shape.kv_heads) == (
            config.num_layers, config.num_heads, config.num_kv_heads
        )  # fmt: skip
        assert model.shape.kv_bytes_per_token(2) == config.kv_bytes_per_token(2)
        assert (model.shape.context, model.shape.tied) == (config.longest_context, config.tie_word_embeddings)
        tables = model.shape.table * (1 if model.shape.tied else 2)
        assert model.shape.matrices + model.shape.vectors + tables == config.num_parameters
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2


def test_the_types_are_those_of_the_library() -> None:
    for number, (name, block, size) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, size))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        *(("Q4_0", 4.5), ("Q4_1", 5.0), ("Q5_0", 5.5), ("Q5_1", 6.0), ("Q8_0", 8.5), ("Q4_K", 4.5), ("Q5_K", 5.5)),
        *(("Q6_K", 6.5625), ("IQ4_NL", 4.5), ("IQ4_XS", 4.3125), ("Q2_K", 8.5), ("IQ3_S", 8.5), ("MXFP4", 8.5)),
        *(("F16", 16), ("BF16", 16), ("F32", 16)),
    ],
)
def test_low_bit_matrices_stay_as_they_are_stored(kind: str, bits: float) -> None:
    tensor = StoredTensor("blk.0.ffn_up.weight", (512, 1024), kind)
    assert weights_in_memory([tensor], GPU).memory == 512 * 1024 * bits / 8
    if kind in LOW_BIT and kind != "IQ4_XS":  # its scales take more bits than in the file
        assert weights_in_memory([tensor], CPU).memory == tensor.num_bytes
        assert BLOCKS[kind][1] * 8 / BLOCKS[kind][0] == bits
    assert weights_in_memory([StoredTensor("blk.0.attn_norm.weight", (64,), "F32")], GPU).memory == 128


def test_an_8b_in_4_bits_takes_what_its_file_does(tmp_path: Path) -> None:
    path = forge_gguf(tmp_path / "8b.gguf", LLAMA_8B)
    assert path.stat().st_blocks < 1000, "the file is a hole"
    model = sized("x", path)
    assert model.shape == LLAMA_8B
    published = {form.form: form.size for form in load_manifest().models["llama-3.1-8b"].all_forms()}
    assert model.size == pytest.approx(published["q4_k_m"], rel=0.003)  # the rest is the tokenizer
    for layout in (GPU, CPU):
        weights = weights_in_memory(model.tensors, layout)
        assert weights.memory == pytest.approx(model.size, rel=0.001)  # norms alone differ
        assert weights.memory - weights.read == 128256 * 4096 * 4.5 / 8
        assert weights.loading < 1 << 20


def test_without_a_download_the_table_says_the_same(tmp_path: Path) -> None:
    cases = {"llama-3.1-8b": (LLAMA_8B, q := forge_hf(tmp_path / "8b", LLAMA_8B, hf_tensors(LLAMA_8B)))}
    cases["llama-3.2-1b"] = (LLAMA_1B, forge_hf(tmp_path / "1b", LLAMA_1B, hf_tensors(LLAMA_1B)))
    assert (q / "model.safetensors").stat().st_size > 16e9
    for name, (shape, path) in cases.items():
        entry, real = load_manifest().models[name], sized("x", path)
        assert entry.shape == real.shape == shape
        guessed = sized_entry(entry)
        assert guessed is not None
        assert guessed.size == pytest.approx(real.size, rel=1e-4)
        for layout in (GPU, CPU, Layout(2, quantize="int4")):
            expected, found = (weights_in_memory(model.tensors, layout) for model in (guessed, real))
            assert found.memory == pytest.approx(expected.memory, rel=1e-3)
            assert found.read == pytest.approx(expected.read, rel=1e-3)
            assert found.loading == expected.loading
    low = weights_in_memory(expected_tensors(LLAMA_8B, 4_920_739_232), GPU)
    assert low.memory == 4_920_739_232
    assert low.read == pytest.approx(low.memory * (1 - LLAMA_8B.table / 8.03e9), rel=0.001)


def test_packed_weights_take_what_their_file_does(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    model = sized("x", forge_hf(tmp_path / "awq", LLAMA_8B, awq_tensors(LLAMA_8B), **config))
    assert weights_in_memory(model.tensors, GPU).memory == model.size == pytest.approx(5.73e9, rel=0.01)
    assert quantized(model) == []


def test_matrices_that_are_quantized_while_they_are_loaded_shrink(tmp_path: Path) -> None:
    model = sized("x", forge_hf(tmp_path / "8b", LLAMA_8B, hf_tensors(LLAMA_8B)))
    plain = LLAMA_8B.table * 2 + LLAMA_8B.vectors * 2
    matrices = LLAMA_8B.matrices + LLAMA_8B.table  # the head, too
    *whole, in_fp8 = quantized(model)
    for each, bits in zip(whole, (9.0, 5.0), strict=True):
        layout = Layout(2, quantize=each.quantize)
        assert weights_in_memory(each.tensors, layout).memory == plain + matrices * bits / 8
    rows = sum(tensor.shape[0] for tensor in model.tensors if tensor.name.endswith("_proj.weight"))
    memory = weights_in_memory(in_fp8.tensors, Layout(2, quantize=in_fp8.quantize)).memory
    assert memory == plain + LLAMA_8B.table * 2 + LLAMA_8B.matrices + 4 * rows
    tied = sized("x", forge_hf(tmp_path / "1b", LLAMA_1B, hf_tensors(LLAMA_1B)))
    memory = weights_in_memory(tied.tensors, Layout(2, quantize="int8")).memory
    assert memory == 2 * (LLAMA_1B.table + LLAMA_1B.vectors) + LLAMA_1B.matrices * 9.0 / 8


def test_fp8_takes_a_byte_a_weight_where_rows_have_a_scale() -> None:
    name, shape = "model.layers.0.mlp.up_proj.weight", (512, 1024)
    matrix, count = StoredTensor(name, shape, "F8_E4M3"), 512 * 1024
    assert weights_in_memory([matrix], GPU).memory == count + 4 * 512
    assert weights_in_memory([matrix], Layout(2, storage="expanded")).memory == 2 * count
    whole = StoredTensor(f"{name}_scale_inv", (), "F32")
    assert weights_in_memory([matrix, whole], GPU).memory < 1.01 * count
    blocks = StoredTensor(f"{name}_scale_inv", (4, 8), "F32")
    assert weights_in_memory([matrix, blocks], GPU).memory == 2 * count + blocks.num_bytes


def header_of(values: object, data: bytes = b"") -> bytes:
    text = json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x00",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 900) + b"{}",
        header_of(entry()),
        header_of(entry(shape=[1 << 40, 1 << 40]), b"x" * 16),
        header_of(entry(shape=[-2, -2]), b"x" * 16),
        header_of(entry(shape=[2.0, 2]), b"x" * 16),
        header_of(entry(shape="22"), b"x" * 16),
        header_of(entry(data_offsets=[0, 1 << 60]), b"x" * 16),
        header_of(entry(data_offsets=[16]), b"x" * 16),
        header_of(entry(data_offsets=[0, 8]), b"x" * 16),
        header_of([1, 2], b"x" * 16),
        header_of({"x": 3}, b"x" * 16),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_a_header_that_lies_is_one_line(tmp_path: Path, data: bytes) -> None:
    forge_hf(tmp_path, LLAMA_1B, {})
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match=r"model\.safetensors: ") as caught:
        read_stored(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_gguf_file_that_lies_is_one_line(tmp_path: Path) -> None:
    whole = forge_gguf(tmp_path / "m.gguf", LLAMA_8B)
    with whole.open("r+b") as stream:
        stream.truncate(whole.stat().st_size - 1)
    with pytest.raises(WeightsError, match=r"cut short within tensor blk\.31\.ffn_norm\.weight"):
        read_stored(whole)
    with whole.open("r+b") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(WeightsError, match=r"outside the file|cut short|larger than the file"):
        read_stored(whole)
    data = whole.open("rb").read(40000)
    for path, content in ((tmp_path / "a.gguf", data[:100]), (tmp_path / "b.gguf", b"GGUF" + b"\xff" * 60)):
        path.write_bytes(content)
        with pytest.raises(WeightsError):
            read_stored(path)
    odd = forge_gguf(tmp_path / "c.gguf", LLAMA_8B)
    content = odd.open("rb").read(40000)
    at = content.index(b"llama.block_count") + len("llama.block_count") + 4
    with odd.open("r+b") as stream:
        stream.seek(at)
        stream.write(struct.pack("<I", 1 << 31))
    with pytest.raises(WeightsError, match=r"llama\.block_count must be a whole number"):
        sized("x", odd)
    nothing = forge_gguf(tmp_path / "d.gguf", LLAMA_8B)
    content = nothing.open("rb").read(40000)
    with nothing.open("r+b") as stream:
        stream.seek(content.index(b"token_embd"))
        stream.write(b"token_embx")
    with pytest.raises(WeightsError, match=r"no tensor token_embd\.weight"):
        sized("x", nothing)


def test_missing_and_foreign_shards_are_one_line(tmp_path: Path) -> None:
    forge_hf(tmp_path, LLAMA_1B, {})
    index = tmp_path / "model.safetensors.index.json"
    wrong: list[object] = [{"x": "../../etc/passwd"}, {"x": 3}, {"x": {"y": 1}}, {"x": []}, {}, []]
    for weight_map in wrong:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(WeightsError, match="no weight_map of file names"):
            read_stored(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"gone\.safetensors"):
        read_stored(tmp_path)
    index.unlink()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors"):
        read_stored(tmp_path)
