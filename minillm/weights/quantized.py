"""Read and validate the quantization settings in the config.json of safetensors checkpoints.

Formats: AutoGPTQ and GPTQModel (GPTQ), AutoAWQ (``gemm``), AutoRound, compressed-tensors, and plain FP8. The shapes and
types of a matrix's tensors determine its format (`minillm.weights.packed`). So one checkpoint may mix bit widths, and
the config's lists of exceptions (``ignore``, ``modules_to_not_convert``) are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minillm.errors import WeightsError
from minillm.text.reading import Values, is_there, read_json, shown

Method = Literal["gptq", "awq", "packed", "int8", "fp8"]
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")
# AutoRound's names of packing formats -> `Quantized.zero_offset`.
_AUTO_ROUND = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0, "auto_round:auto_awq": 0}
BITS = (4, 8)


@dataclass(frozen=True)
class Quantized:
    """The storage format of one matrix.

    ``zero_offset`` is added to the stored zeros. ``block`` is the size (rows, columns) of blocks that share an FP8
    scale; None without such blocks.
    """

    method: Method
    bits: int = 8
    zero_offset: int = 0
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Quantization:
    """The quantization settings in a checkpoint's config.

    Args:
        method: the quantization method's name in the config.
        bits: the bit widths of weights that the config announces.
        zero_offset: see `Quantized`. It is 1 for GPTQ's first format, which stores each zero minus one.
        blocks: the sizes (rows, columns) of blocks that share an FP8 scale. Groups of layers may have different sizes.
    """

    method: str
    bits: tuple[int, ...] = (8,)
    zero_offset: int = 0
    blocks: tuple[tuple[int, int], ...] = ()


def read_quantized(directory: Path) -> Quantization | None:
    """Read ``quantization_config`` from a model's config.json. Older GPTQ models have a quantize_config.json instead.

    Return None without either. Raises WeightsError if the method, format or bit width is not supported.
    """
    config = Values("config.json", read_json(directory / "config.json"))
    values, older = config.part("quantization_config"), directory / "quantize_config.json"
    if config.part("quantization").has("group_size"):  # MLX also writes quantization_config, without a method
        raise _unsupported(config.where, "MLX")
    if is_there(directory / "hf_quant_config.json") and not values.has("quant_method"):
        raise _unsupported("hf_quant_config.json", "modelopt")
    if not values.values:
        if not is_there(older):
            return None
        values = Values(older.name, {"quant_method": "gptq", **read_json(older)})
    method = values.text("quant_method", "unknown")
    if method not in _READERS:
        raise _unsupported(values.where, method)
    return _READERS[method](values)


def _unsupported(where: str, method: str) -> WeightsError:
    known = ", ".join(_READERS)
    return WeightsError(f"{where}: weights quantized with {shown(method)} are not supported; supported: {known}")


def _gptq(values: Values) -> Quantization:
    form = values.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise values.error("checkpoint_format", "gptq or gptq_v2")
    return Quantization("gptq", (_bits(values, "bits", BITS),), zero_offset=int(form == "gptq"))


def _awq(values: Values) -> Quantization:
    if values.text("version", "gemm").lower() != "gemm":
        raise values.error("version", "gemm")
    return Quantization("awq", (_bits(values, "bits", (4,)),))


def _auto_round(values: Values) -> Quantization:
    if not values.text("data_type", "int").startswith("int"):
        raise values.error("data_type", "int")
    packing = values.text("packing_format", "auto_round:auto_gptq")
    if packing not in _AUTO_ROUND:
        raise values.error("packing_format", f"one of {', '.join(_AUTO_ROUND)}")
    return Quantization("auto-round", (_bits(values, "bits", BITS),), zero_offset=_AUTO_ROUND[packing])


def _fp8(values: Values) -> Quantization:
    return Quantization("fp8", blocks=_block(values, "weight_block_size"))


def _block(values: Values, key: str) -> tuple[tuple[int, int], ...]:
    """Return a tuple with the block size (rows, columns) under ``key``, or an empty tuple without the key."""
    if not values.has(key):
        return ()
    rows, columns = values.numbers(key, 2)
    if rows % 1 or columns % 1 or max(rows, columns) > 1 << 24:
        raise values.error(key, "two whole numbers")
    return ((int(rows), int(columns)),)


def _bits(values: Values, key: str, known: tuple[int, ...]) -> int:
    if (bits := values.integer(key)) not in known:
        raise values.error(key, " or ".join(map(str, known)))
    return bits


def _compressed(values: Values) -> Quantization:
    groups = values.part("config_groups")
    schemes = [groups.part(key) for key in groups.values]
    for each in (values, *(scheme for scheme in schemes if scheme.has("format"))):  # mixed precision: one per group
        if each.text("format", "unknown") not in _FORMATS:
            raise each.error("format", f"one of {', '.join(_FORMATS)}")
    for key in ("sparsity_config", "transform_config"):
        if values.part(key).values and values.part(key).text("format", "") != "dense":
            raise WeightsError(f"{values.where}: {key} is not supported")
    weights = [scheme.part("weights") for scheme in schemes]
    bits = {_bits(each, "num_bits", (8,) if each.text("type", "int") == "float" else BITS) for each in weights}
    if not bits:
        raise values.error("config_groups", "groups with a number of bits")
    blocks = {block for each in weights for block in _block(each, "block_structure")}
    return Quantization("compressed-tensors", tuple(sorted(bits)), blocks=tuple(sorted(blocks)))


_READERS: dict[str, Callable[[Values], Quantization]] = {
    "gptq": _gptq, "awq": _awq, "auto-round": _auto_round, "compressed-tensors": _compressed, "fp8": _fp8,
}  # fmt: skip
