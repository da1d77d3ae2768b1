"""Checkpoints of safetensors whose matrices are stored in few bits: what their config says of them, checked once.

Formats: AutoGPTQ and GPTQModel (GPTQ), AutoAWQ (``gemm``), compressed-tensors, and plain FP8. Which matrices are
quantised is seen from their tensors, so lists of exceptions (``ignore``, ``modules_to_not_convert``) need no reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minillm.errors import WeightsError
from minillm.text.reading import Values, is_there, read_json, shown

Method = Literal["gptq", "awq", "packed", "int8", "fp8"]
_FORMATS: dict[str, Method] = {
    "pack-quantized": "packed",
    "int-quantized": "int8",
    "naive-quantized": "int8",
    "float-quantized": "fp8",
}


@dataclass(frozen=True)
class Quantised:
    """How matrices are stored. ``zero_offset`` is added to the zeros of the file (GPTQ's first format stores one less).

    ``block`` is the rows and columns that share a scale of FP8, where they are cut in both directions.
    """

    method: Method
    bits: int = 8
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def read_quantised(directory: Path) -> Quantised | None:
    """Read ``quantization_config`` of a model's config.json, or GPTQ's older file of its own; None where neither is.

    Raises WeightsError where it names a method, format or number of bits that is not supported.
    """
    values = Values("config.json", read_json(directory / "config.json")).part("quantization_config")
    older = directory / "quantize_config.json"
    if not values.values:
        if not is_there(older):
            return None
        values = Values(older.name, {"quant_method": "gptq", **read_json(older)})
    method = values.text("quant_method", "unknown")
    if method == "gptq":
        form = values.text("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise values.error("checkpoint_format", "gptq or gptq_v2")
        return Quantised("gptq", _bits(values, "bits", (4, 8)), zero_offset=int(form == "gptq"))
    if method == "awq":
        if values.text("version", "gemm").lower() != "gemm":
            raise values.error("version", "gemm")
        return Quantised("awq", _bits(values, "bits", (4,)))
    if method == "fp8":
        if not values.has("weight_block_size"):
            return Quantised("fp8")
        rows, columns = values.numbers("weight_block_size", 2)
        if rows % 1 or columns % 1 or max(rows, columns) > 1 << 24:
            raise values.error("weight_block_size", "two whole numbers")
        return Quantised("fp8", block=(int(rows), int(columns)))
    if method == "compressed-tensors":
        return _compressed(values)
    known = "gptq, awq, compressed-tensors, fp8"
    raise WeightsError(f"{values.where}: weights quantised with {shown(method)} are not supported; supported: {known}")


def _bits(values: Values, key: str, known: tuple[int, ...]) -> int:
    if (bits := values.integer(key)) not in known:
        raise values.error(key, " or ".join(map(str, known)))
    return bits


def _compressed(values: Values) -> Quantised:
    form = values.text("format", "unknown")
    if form not in _FORMATS:
        raise values.error("format", f"one of {', '.join(_FORMATS)}")
    for key in ("sparsity_config", "transform_config"):
        if values.part(key).values and values.part(key).text("format", "") != "dense":
            raise WeightsError(f"{values.where}: {key} is not supported")
    groups = values.part("config_groups")
    weights = [groups.part(key).part("weights") for key in groups.values]
    if form == "naive-quantized" and weights and weights[0].text("type", "int") == "float":
        form = "float-quantized"
    bits = {_bits(each, "num_bits", (4, 8) if form == "pack-quantized" else (8,)) for each in weights}
    if len(bits) != 1:
        raise values.error("config_groups", "groups of one number of bits")
    return Quantised(_FORMATS[form], bits.pop())
