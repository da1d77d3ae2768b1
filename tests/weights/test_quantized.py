"""Test quantized safetensors checkpoints. Each is packed here from its format's description, in numpy."""

import json
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lib.engine import logits_in_chunks
from minillm import kernels
from minillm.errors import WeightsError
from minillm.kernels.linear.low_bit.layouts import FP8, dequantize
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import load_llama, parameter_shapes
from minillm.storage import Storage
from minillm.weights.checkpoint import open_checkpoint
from minillm.weights.files import ModelFiles

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, lowest first


def words(levels: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """``levels [rows, columns]`` in words along the rows."""
    n = 32 // bits
    split = levels.reshape(levels.shape[0], -1, n).astype(np.uint32)
    found = np.zeros(split.shape[:2], np.uint32)
    for place in range(n):
        found |= split[..., order[place] if order else place] << np.uint32(bits * place)
    return found.view(np.int32)


def pack(
    kind: str, shape: tuple[int, ...], random: np.random.Generator
) -> tuple[dict[str, np.ndarray | Tensor], np.ndarray]:
    """The tensors of a random matrix by their last names, and its weights in float64."""
    (out, width), (method, _, rest) = shape, kind.partition(":")
    tensors: dict[str, np.ndarray | Tensor]
    bits, size, flavour = ((*rest.split("-"), "")[:3]) if rest else ("8", "0", "")
    b, group = int(bits), int(size) or width
    count, most = width // group, 1 << b
    levels = random.integers(0, most, (out, width))
    scales = random.uniform(0.001, 0.02, (out, count)).astype(np.float16)
    zeros = random.integers(0, most, (out, count))
    groups = np.arange(width) // group
    if flavour == "act":
        np.random.default_rng(width).shuffle(groups)  # by the input: one order for q, k and v
    if method in ("gptq", "gptq_v2", "auto_gptq", "gptqmodel"):
        stored = (zeros - (method in ("gptq", "auto_gptq"))) % most
        tensors = {"qweight": words(levels, b).T, "qzeros": words(stored.T, b), "scales": scales.T, "g_idx": groups}
        tensors["g_idx"] = groups.astype(np.int32)
    elif method in ("awq", "auto_awq"):
        tensors = {"qweight": words(levels.T, 4, _AWQ), "qzeros": words(zeros.T, 4, _AWQ), "scales": scales.T}
    elif method == "packed":
        tensors = {"weight_packed": words(levels, b), "weight_scale": scales, "weight_shape": np.array([out, width])}
        if flavour == "sym":
            zeros[:] = most // 2
        else:
            tensors["weight_zero_point"] = words(zeros.T, b).T
        if flavour == "act":
            tensors["weight_g_idx"] = groups.astype(np.int32)
    elif method == "int8":
        zeros[:] = 128
        tensors = {"weight": (levels - 128).astype(np.int8), "weight_scale": scales}
    else:
        values = torch.from_numpy(random.normal(0, 40, (out, width))).to(torch.float8_e4m3fn)
        if method in ("block", "fp8_block"):
            factor = random.uniform(1e-4, 5e-4, (-(-out // 48), -(-width // 48))).astype(np.float32)
            spread = factor.repeat(48, 0)[:out].repeat(48, 1)[:, :width]
        else:
            factor = random.uniform(1e-4, 5e-4, {"tensor": (), "channel": (out, 1)}[method]).astype(np.float32)
            spread = factor
        name = "weight_scale_inv" if method == "block" else "weight_scale"
        tensors = {"weight": values, name: np.asarray(factor, np.float32)}
        if method == "tensor":  # Ministral 3 has scales of activations, which are not used
            tensors["activation_scale"] = np.asarray(0.1, np.float32)
        return tensors, values.double().numpy() * spread
    return tensors, scales.astype(np.float64)[:, groups] * (levels - zeros[:, groups])


def quantization(kind: str) -> dict[str, object]:
    method, _, rest = kind.partition(":")
    bits = int(rest.split("-")[0]) if rest else 8
    if method in ("auto_gptq", "gptqmodel", "auto_awq"):
        return {"quant_method": "auto-round", "bits": bits, "packing_format": f"auto_round:{method}"}
    if method.startswith("gptq"):
        return {"quant_method": "gptq", "bits": bits, "checkpoint_format": method}
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "version": "gemm"}
    if method == "block":
        return {"quant_method": "fp8", "weight_block_size": [48, 48]}
    form = {"packed": "pack-quantized", "int8": "int-quantized"}.get(method, "float-quantized")
    weights: dict[str, object] = {"num_bits": bits, "type": "int" if ":" in kind else "float"}
    if method == "fp8_block":
        weights |= {"strategy": "block", "block_structure": [48, 48]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["re:.*head"], "config_groups": groups}


def write(directory: Path, *kinds: str, **changes: Tensor) -> dict[str, Tensor]:
    """A random checkpoint, its matrices of these kinds in turn; its exact weights."""
    random, tensors, exact, kind = np.random.default_rng(7), {}, {}, cycle(kinds)
    for name, shape in parameter_shapes(ModelConfig.from_hf(CONFIG)):
        if "_proj" in name:
            parts, weights = pack(next(kind), shape, random)
            for part, value in parts.items():
                whole = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
                tensors[f"{name.removesuffix('weight')}{part}"] = whole
            exact[name] = torch.from_numpy(weights)
        else:
            exact[name] = tensors[name] = torch.from_numpy(random.normal(0.5, 0.2, shape)).float()
    save_file(tensors | changes, directory / "model.safetensors")
    config = quantization(kinds[0])
    if len(kinds) > 1 and "config_groups" in config:
        groups = {f"group_{i}": quantization(each)["config_groups"]["group_0"] for i, each in enumerate(kinds)}  # type: ignore[index]
        config |= {"format": "mixed-precision", "config_groups": groups}
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    return exact


KINDS = (
    *("gptq:4-32", "gptq:4-0", "gptq:8-64", "gptq_v2:4-32", "gptq_v2:8-0", "gptq:4-32-act", "awq:4-32", "awq:4-64"),
    *("packed:4-32-sym", "packed:4-32", "packed:8-32-sym", "packed:8-0", "packed:4-32-act", "int8:8-0"),
    *("int8:8-32", "auto_gptq:4-32", "auto_gptq:8-64", "gptqmodel:4-32", "auto_awq:4-32"),
    *("tensor", "channel", "block", "fp8_block"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_format(tmp_path: Path, kind: str) -> None:
    exact = write(tmp_path, kind)
    checkpoint = open_checkpoint(ModelFiles("m", tmp_path, ""))
    assert set(checkpoint.names()) == set(exact)
    for name, weights in exact.items():
        assert checkpoint.shape(name) == tuple(weights.shape)
        assert torch.equal(checkpoint.tensor(name), weights.float())
        matrix = checkpoint.low_bit(name, CPU, None, None)
        if "_proj" not in name or kind.endswith("block"):
            assert matrix is None
            continue
        assert matrix is not None
        assert torch.equal(dequantize(matrix, torch.float64), weights)
        assert (matrix.layout == FP8) == (":" not in kind)
        assert (matrix.order is not None) == kind.endswith("act")
        rows, columns = slice(16, 32), slice(weights.shape[1] // 2, weights.shape[1])
        part = checkpoint.low_bit(name, CPU, rows, columns)
        assert torch.equal(checkpoint.tensor(name, rows, columns), weights[rows, columns].float())
        assert part is None or torch.equal(dequantize(part, torch.float64), weights[rows, columns])
        assert (part is None) == kind.endswith("act"), "groups may lie on both sides of the cut"
        some_rows = checkpoint.low_bit(name, CPU, rows, None)
        assert some_rows is not None
        assert torch.equal(dequantize(some_rows, torch.float64), weights[rows])


MIXTURES = (
    ("packed:4-32-sym", "packed:8-32-sym"),
    ("packed:4-32", "channel", "fp8_block"),
    ("packed:8-32-sym", "int8:8-32", "tensor"),
    ("gptq:4-32", "gptq:8-32"),  # GPTQModel's "dynamic"
    ("auto_gptq:4-32", "auto_gptq:8-32"),
)


@pytest.mark.parametrize("kinds", MIXTURES)
def test_shapes_tell_how_each_matrix_of_a_mixture_is_stored(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    exact = write(tmp_path, *kinds)
    checkpoint = open_checkpoint(ModelFiles("m", tmp_path, ""))
    assert set(checkpoint.names()) == set(exact)
    for name, weights in exact.items():
        assert checkpoint.shape(name) == tuple(weights.shape)
        assert torch.equal(checkpoint.tensor(name), weights.float())


@pytest.mark.parametrize("weights", ["expanded", "stored", "int4"])
def test_logits_of_a_mixture_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Storage
) -> None:
    pytest.importorskip("triton")
    from minillm.kernels.linear.low_bit import choose as low_bit_linear

    monkeypatch.setattr(kernels, "low_bit_linear", low_bit_linear, raising=False)
    exact = write(tmp_path, "packed:4-32-sym", "channel", "packed:8-32", "fp8_block")
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    theirs.load_state_dict({name: tensor.float() for name, tensor in exact.items()})
    checkpoint = open_checkpoint(ModelFiles("m", tmp_path, ""))
    config, ids = ModelConfig.from_hf(checkpoint.config), [index * 7 % 96 for index in range(20)]
    ours = load_llama(checkpoint, config, device=CPU, dtype=torch.float32, max_positions=64, weights=weights)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    close = 1e-4 if weights == "expanded" else 2e-2
    torch.testing.assert_close(logits_in_chunks(ours, ids, [20]), expected, atol=close, rtol=close)


def test_columns_cut_within_a_group_are_widened(tmp_path: Path) -> None:
    exact = write(tmp_path, "awq:4-64")
    checkpoint, name = open_checkpoint(ModelFiles("m", tmp_path, "")), "model.layers.0.mlp.down_proj.weight"
    assert checkpoint.low_bit(name, CPU, None, slice(32, 96)) is None
    part = checkpoint.low_bit(name, CPU, None, slice(64, 128))
    assert part is not None
    assert torch.equal(dequantize(part, torch.float64), exact[name][:, 64:])


@pytest.mark.parametrize(
    "kind", ["gptq:4-32-act", "packed:4-32-act", "awq:4-32", "packed:4-32", "tensor", "block", "int8:8-32"]
)
def test_logits_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pytest.importorskip("triton")
    from minillm.kernels.linear.low_bit import choose as low_bit_linear

    monkeypatch.setattr(kernels, "low_bit_linear", low_bit_linear, raising=False)
    exact = write(tmp_path, kind)
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    theirs.load_state_dict({name: weights.float() for name, weights in exact.items()})
    checkpoint = open_checkpoint(ModelFiles("m", tmp_path, ""))
    config = ModelConfig.from_hf(checkpoint.config)

    def load(weights: str) -> Llama:
        options = {"device": CPU, "dtype": torch.float32, "max_positions": 64, "weights": weights}
        return load_llama(checkpoint, config, **options)  # type: ignore[arg-type]

    ids = [index * 7 % 96 for index in range(20)]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_in_chunks(load("expanded"), ids, [20]), expected, atol=1e-4, rtol=1e-4)
    kept = load("stored")
    for linear in kept.linears[:-1]:
        assert bool(linear.parts) == (kind != "block")
        assert all((part.order is not None) == kind.endswith("act") for part in linear.parts)
    torch.testing.assert_close(logits_in_chunks(kept, ids, [19, 1]), expected, atol=2e-3, rtol=2e-3)


def test_scales_beyond_float16_are_widened(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    huge = torch.full((128, 2), 1e6, dtype=torch.bfloat16)
    write(tmp_path, "packed:4-32", **{f"{name}.weight_scale": huge})
    checkpoint = open_checkpoint(ModelFiles("m", tmp_path, ""))
    assert checkpoint.low_bit(f"{name}.weight", CPU, None, None) is None
    assert checkpoint.tensor(f"{name}.weight").isfinite().all()


@pytest.mark.parametrize(
    ("kind", "part", "forged"),
    [
        ("gptq:4-32", "qzeros", torch.zeros(1, 1, dtype=torch.int32)),
        ("gptq:4-32", "scales", torch.zeros(0, 128)),
        ("gptq:4-32", "g_idx", torch.full((64,), -1, dtype=torch.int32)),
        ("gptq:4-32", "g_idx", torch.full((64,), 2, dtype=torch.int32)),
        ("awq:4-32", "qzeros", torch.zeros(2, 16)),
        ("awq:4-32", "scales", torch.zeros(3, 128)),
        ("packed:4-32", "weight_scale", torch.zeros(128, 2, dtype=torch.int32)),
        ("packed:4-32", "weight_scale", torch.zeros(2, 2, 2)),
        ("packed:4-32", "weight_zero_point", torch.zeros(7)),
        ("packed:4-32", "weight_shape", torch.full((2,), 1 << 60)),
        ("packed:4-32", "weight_shape", torch.tensor([128, -64])),
        ("int8:8-0", "weight_scale", torch.zeros(5, 1)),
        ("channel", "weight_scale", torch.zeros(5, 1)),
        ("fp8_block", "weight_scale", torch.zeros(7, 3)),
        ("int8:8-32", "weight_scale", torch.zeros(0, 2)),
        ("auto_gptq:4-32", "qzeros", torch.zeros(2, 12, dtype=torch.int32)),  # of 3 bits
        ("block", "weight_scale_inv", torch.zeros(9, 1)),
    ],
)
def test_forged_tensors_are_refused(tmp_path: Path, kind: str, part: str, forged: Tensor) -> None:
    write(tmp_path, kind, **{f"model.layers.0.mlp.up_proj.{part}": forged})
    checkpoint = open_checkpoint(ModelFiles("m", tmp_path, ""))
    with pytest.raises(WeightsError, match=r"up_proj\.weight"):
        checkpoint.tensor("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "hqq"}, "hqq"),
        ({"group_size": 64, "bits": 4}, "unknown"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "auto-round", "bits": 2}, "bits"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "mx_fp"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:marlin"}, "packing_format"),
        ({"quant_method": "gptq", "bits": 3}, "bits"),
        ({"quant_method": "gptq"}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, config: dict[str, object], named: str) -> None:
    write(tmp_path, "awq:4-32")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    with pytest.raises(WeightsError, match=named):
        open_checkpoint(ModelFiles("m", tmp_path, ""))


def test_an_older_gptq_file_with_biases_of_zeros(tmp_path: Path) -> None:
    exact = write(tmp_path, "gptq:4-32", **{"model.layers.0.mlp.up_proj.bias": torch.zeros(128)})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    checkpoint = open_checkpoint(ModelFiles("m", tmp_path, ""))
    assert set(checkpoint.names()) == set(exact)
    for name, weights in exact.items():
        assert torch.equal(checkpoint.tensor(name), weights.float())


def test_the_older_files_of_mlx_and_modelopt_are_named(tmp_path: Path) -> None:
    write(tmp_path, "awq:4-32")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization": {"group_size": 64, "bits": 4}}))
    with pytest.raises(WeightsError, match="'MLX' are not supported"):
        open_checkpoint(ModelFiles("m", tmp_path, ""))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(WeightsError, match="'modelopt' are not supported"):
        open_checkpoint(ModelFiles("m", tmp_path, ""))
