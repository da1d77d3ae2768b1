"""Test GGUF files with matrices that stay quantized, against gguf's dequantization and in a model's forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize as gguf_dequantize

from lib.engine import logits_in_chunks
from lib.gguf_files import gguf_model, write_gguf
from lib.kernels import relative_error
from minillm import LLM, kernels
from minillm.errors import UsageError
from minillm.kernels import LowBit
from minillm.kernels.linear.low_bit.layouts import dequantize
from minillm.model.calibration import calibrate_int8
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import load_llama
from minillm.weights.gguf_blocks import low_bit
from minillm.weights.gguf_file import GGUFCheckpoint
from minillm.weights.stored import LOW_BIT

CPU = torch.device("cpu")
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
# Where in a block the float16 numbers lie: a random byte pattern would make most of them huge.
HALVES = {"Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}


def random_blocks(kind: Type, rows: int, width: int, *, special: bool = False) -> np.ndarray:
    """Rows of blocks of random bytes, with scales of both signs, zeros, and NaN and infinity if ``special``."""
    rng = np.random.default_rng(7)
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, width // block, size), dtype=np.uint8)
    for at in HALVES.get(kind.name, (0,)):
        scales = rng.uniform(-0.1, 0.1, raw.shape[:2]).astype(np.float16)
        scales[0, 0], scales[1, 0] = 0.0, -0.0
        if special:
            scales[2, 0], scales[3, 0] = np.nan, np.inf
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_blocks_are_the_numbers_that_the_library_makes_of_them(name: str, special: bool) -> None:
    kind = Type[name]
    assert name in LOW_BIT
    for rows, width in ((5, 256), (33, 1280)):
        raw = random_blocks(kind, rows, width, special=special)
        with np.errstate(all="ignore"):
            exact = torch.from_numpy(gguf_dequantize(raw, kind))
        matrix = low_bit(torch.from_numpy(raw), kind, width)
        torch.testing.assert_close(dequantize(matrix), exact, rtol=0, atol=0, equal_nan=True)
        more = 256 // 16 * rows * width // 256 // 8 if name == "IQ4_XS" else 0  # its scales take 8 bits and not 6
        assert matrix.nbytes == raw.nbytes + more


def test_slabs_of_rows_are_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_blocks(Type.Q6_K, 9, 512))
    whole = low_bit(raw, Type.Q6_K, 512)
    monkeypatch.setattr("minillm.weights.gguf_blocks.AT_ONCE_ON_CPU", 1024)
    assert torch.equal(dequantize(low_bit(raw, Type.Q6_K, 512)), dequantize(whole))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_parts_of_a_file(tmp_path: Path, name: str) -> None:
    """Rows of q and k lie in another order; ranks take rows and columns; a cut within a block cannot be held so."""
    write_gguf(tmp_path / "m.gguf", gguf_model(), Type[name])
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    for tensor in checkpoint.names():
        matrix = checkpoint.low_bit(tensor, CPU, None, None)
        if len(checkpoint.shape(tensor)) == 1:
            assert matrix is None
            continue
        assert matrix is not None
        assert torch.equal(dequantize(matrix), checkpoint.tensor(tensor))
        rows, columns = slice(8, 24), slice(32, 96)
        part = checkpoint.low_bit(tensor, CPU, rows, columns)
        assert part is not None
        assert torch.equal(dequantize(part), checkpoint.tensor(tensor, rows, columns))
        assert checkpoint.low_bit(tensor, CPU, None, slice(16, 64)) is None


def load(path: Path, weights: str) -> Llama:
    checkpoint = GGUFCheckpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    options = {"device": CPU, "dtype": torch.float32, "max_positions": 64, "weights": weights}
    return load_llama(checkpoint, config, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "tied"), [("Q4_1", True), ("Q8_0", False)])
def test_a_model_computes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tied: bool) -> None:
    pytest.importorskip("triton")
    from minillm.kernels.linear.low_bit import choose as low_bit_linear

    monkeypatch.setattr(kernels, "low_bit_linear", low_bit_linear, raising=False)
    write_gguf(tmp_path / "m.gguf", gguf_model(tie_word_embeddings=tied, attention_bias=True), Type[name])
    plain, kept = load(tmp_path / "m.gguf", "expanded"), load(tmp_path / "m.gguf", "stored")
    assert isinstance(kept.embedding, LowBit)
    assert (kept.head.parts[0] is kept.embedding) == tied  # once in memory
    assert len(kept.layers[0].qkv.parts) == 1
    assert kept.weight_bytes < plain.config.num_parameters * 1.2
    tokens = [3, 14, 15, 92, 65, 35]
    expected = logits_in_chunks(plain, tokens, [6])
    for chunks in ([6], [5, 1]):
        torch.testing.assert_close(logits_in_chunks(kept, tokens, chunks), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("kind", "tied"), [("Q4_1", True), ("Q8_0", False), ("F16", True), ("F16", False)])
def test_a_cpu_computes_in_8_bits_where_it_is_asked_to(tmp_path: Path, kind: str, tied: bool) -> None:
    write_gguf(tmp_path / "m.gguf", gguf_model(tie_word_embeddings=tied, attention_bias=True), Type[kind])
    plain, model = (load(tmp_path / "m.gguf", each) for each in ("expanded", "int8"))
    calibrate_int8(model, 64)
    assert isinstance(model.embedding, LowBit)
    assert model.weight_bytes < plain.config.num_parameters * 1.3
    tokens = [3, 14, 15, 92, 65, 35]
    expected = logits_in_chunks(plain, tokens, [6])
    for chunks in ([6], [5, 1]):  # 13 products one after the other, and each loses up to 1.2e-2
        assert relative_error(logits_in_chunks(model, tokens, chunks), expected) < 0.05


@pytest.mark.parametrize(("kind", "tied"), [("Q4_1", True), ("Q4_0", False), ("Q8_0", False), ("F16", True)])
def test_a_cpu_keeps_few_bits_where_it_is_asked_to(tmp_path: Path, kind: str, tied: bool) -> None:
    """Matrices of 4 bits stay at 4, other quantized ones get 8, and 16-bit ones stay exact."""
    write_gguf(tmp_path / "m.gguf", gguf_model(tie_word_embeddings=tied, attention_bias=True), Type[kind])
    plain, in_8, model = (load(tmp_path / "m.gguf", each) for each in ("expanded", "int8", "int4"))
    tokens = [3, 14, 15, 92, 65, 35]
    expected = logits_in_chunks(plain, tokens, [6])
    if kind == "F16":
        assert torch.equal(logits_in_chunks(model, tokens, [6]), expected)
        return
    for each in (in_8, model):
        calibrate_int8(each, 64)
    assert isinstance(model.embedding, LowBit)
    matrices = [each for layer in model.layers for each in layer.linears]
    assert {each.packed is not None and each.packed.in_4_bits is not None for each in matrices} == {kind != "Q8_0"}
    assert sum(each.num_bytes for each in matrices) <= sum(e.num_bytes for layer in in_8.layers for e in layer.linears)
    for chunks in ([6], [5, 1]):
        assert relative_error(logits_in_chunks(model, tokens, chunks), expected) < 0.05


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("int8", "int8 needs a CPU and dtype float32"),
        ("stored", "stored on a CPU needs dtype float32"),
        ("both", "both needs a GPU"),
    ],
)
def test_ways_to_hold_weights_are_refused_where_there_are_none(weights: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LLM("smollm2-135m", load_format="dummy", device="cpu", dtype="bfloat16", weights=weights)


def test_a_file_of_mixed_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused matrix with a part in 16 bits is held in 16 bits; all others stay."""
    pytest.importorskip("triton")
    from minillm.kernels.linear.low_bit import choose as low_bit_linear

    monkeypatch.setattr(kernels, "low_bit_linear", low_bit_linear, raising=False)
    write_gguf(tmp_path / "m.gguf", gguf_model(), Type.Q4_1)
    whole = GGUFCheckpoint.low_bit

    def all_but_v(self: GGUFCheckpoint, name: str, *args: object) -> LowBit | None:
        return None if "v_proj" in name else whole(self, name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(GGUFCheckpoint, "low_bit", all_but_v)
    kept, plain = load(tmp_path / "m.gguf", "stored"), load(tmp_path / "m.gguf", "expanded")
    assert not kept.layers[0].qkv.parts
    assert kept.layers[0].gate_up.parts
    tokens = [3, 14, 15, 92]
    expected = logits_in_chunks(plain, tokens, [4])
    torch.testing.assert_close(logits_in_chunks(kept, tokens, [4]), expected, atol=2e-3, rtol=2e-3)


def test_types_that_are_unpacked() -> None:
    assert not set(LOW_BIT) & {"F32", "F16", "BF16", "Q2_K", "Q3_K", "TQ1_0"}
