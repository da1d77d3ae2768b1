"""``minillm tune``: how a model's low-bit matrices are cut best on this GPU, measured anew, shown, and kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

from minillm.bench.table import ModelOptions, computed, plain, show, shown, weights
from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.progress import loading_bar, say
from minillm.system import import_torch
from minillm.user_config import read_config


@dataclass(frozen=True)
class TileResult:
    """The fastest tile of a product."""

    tile: tuple[int, ...]  # of `low_bit_matvec` up to two tokens, then of `low_bit_matmul`; none: unpacked first
    product: str = shown("matrix", width=48)
    tokens: int = shown("tokens", "d")  # and fewer, down to those of the line above
    microseconds: float = shown("us", ".1f")
    floor: float = shown("floor us", ".1f")  # the matrix once, at copy bandwidth

    @computed("of it", ".0%")
    def share(self) -> float:
        return self.floor / self.microseconds

    @computed("tile", "")
    def cut(self) -> str:
        return " ".join(map(str, self.tile)) or "unpacked"


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print a table."""
    settings, shape = read_config(arguments.config), ModelOptions(arguments.shape).shape
    model = arguments.model or (None if shape else settings.choose_model(None))
    given = {"device": arguments.device, "quantize": arguments.quantize}
    options = {**settings.engine, **{name: value for name, value in given.items() if value is not None}}
    chosen = weights(shape, model)
    name = chosen.pop("model")
    results = list(_measured(name, EngineConfig(**{**options, **chosen, "tensor_parallel_size": 1})))
    if arguments.json:
        print(json.dumps(plain(results)))
    else:
        show(results, name)
    return 0


def _measured(name: str, config: EngineConfig) -> Iterator[TileResult]:
    """Raises UsageError without a GPU, or where the model has no matrix of few bits there."""
    import_torch()
    from minillm.bench.meter import read_bandwidth
    from minillm.loading.build import choose_device, describe, load_weights

    device = choose_device(config)
    if device.type != "cuda":
        raise UsageError("minillm tune needs a CUDA GPU; on a CPU there is nothing to choose")
    from minillm.loading.tiles import TileFile, measured, products_of

    with loading_bar() as report:
        model, _ = load_weights(describe(name, config, report, say), config, device, None, report)
        products, file = products_of(model), TileFile.of(device)
        if not products:
            raise UsageError(f"{name} has no matrices of few bits: name such a form of it, or add --quantize int4")
        bandwidth = read_bandwidth(device, 1 << 28)
        for each in measured(products, model.dtype, file, report, say):
            floor = products[each.product][0].nbytes / bandwidth * 1e6
            yield TileResult(each.tile, str(each.product), each.tokens, each.microseconds, floor)
    say(f"kept in {file.path}")
