"""Choose the tile sizes with which a loaded model's low-bit kernels run on its GPU.

A tile may be built in, measured by an earlier run, or measured now. Measured tiles are stored in one file for each kind
of card and version of Triton. The file has a digest of the kernels' source code. It is ignored if the kernels have
changed since. Tiles that are no longer candidates are ignored as well.
"""

import hashlib
import inspect
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from minillm.kernels import LinearWeight, LowBit
from minillm.kernels.linear.low_bit import few_tokens as low_bit_matmul
from minillm.kernels.linear.low_bit import lanes as low_bit_lanes
from minillm.kernels.linear.low_bit import one_token as low_bit_matvec
from minillm.kernels.linear.low_bit import planes as low_bit_tiles
from minillm.kernels.linear.low_bit import tuning as low_bit_tuning
from minillm.kernels.linear.low_bit.tuning import OnCount, Place, Product, Tile, Timed, buckets, candidates
from minillm.loading.gpu_stacks import free_stacks
from minillm.model.llama import Llama
from minillm.parallel.collectives import Ranks
from minillm.progress import OnMessage, OnProgress, Progress, ignore_message
from minillm.system import cache_dir
from minillm.text.reading import read_bytes
from minillm.text.safe import parse_json

RECORDED = "NVIDIA H200"  # the kernels' built-in tiles were tuned for this card
_KERNELS = (low_bit_matvec, low_bit_matmul, low_bit_tiles, low_bit_lanes)
_MOST_BYTES = 1 << 24

Tiles = Mapping[str, Mapping[int, Tile]]  # matmul's name -> number of tokens (a `bucket`) -> tile
Measure = Callable[[Mapping[Product, Sequence[LowBit]], torch.dtype, OnCount, OnCount], Iterator[Timed]]


@dataclass(frozen=True)
class TileFile:
    """The file with the measured tiles of one kind of card."""

    card: str
    path: Path
    kernels: str  # a digest of the kernels' source code

    @classmethod
    def of(cls, device: torch.device) -> "TileFile":
        card, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        name = re.sub(r"[^A-Za-z0-9]+", "-", f"{card} {'.'.join(map(str, capability))} triton{triton.__version__}")
        sources = "".join(map(inspect.getsource, _KERNELS))
        return cls(card, cache_dir() / "tiles" / f"{name}.json", hashlib.sha256(sources.encode()).hexdigest())

    def read(self, on_message: OnMessage) -> Tiles:
        """Return the measured tiles. Return {} if the file is missing or damaged, or if the kernels have changed since.

        Damage is reported to ``on_message``.
        """
        try:
            found = parse_json(read_bytes(self.path, _MOST_BYTES))
            if (found["card"], found["kernels"]) != (self.card, self.kernels):
                return {}
            return {
                str(product): {int(tokens): tuple(tile) for tokens, tile in tiles.items()}
                for product, tiles in found["tiles"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            on_message(f"{self.path} cannot be read ({type(error).__name__}): its tiles are measured again")
            return {}

    def add(self, tiles: Tiles, on_message: OnMessage) -> None:
        """Merge ``tiles`` into the file atomically. If the file cannot be written, send a message to ``on_message``."""
        content = {"card": self.card, "kernels": self.kernels, "tiles": {**self.read(ignore_message), **tiles}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as scratch:
                part = Path(scratch, self.path.name)
                part.write_text(json.dumps(content, indent=1), encoding="utf-8")
                os.replace(part, self.path)
        except OSError as error:
            on_message(f"{self.path} cannot be written ({error.strerror}): tiles will be measured again")


def products_of(model: Llama) -> dict[Product, list[LowBit]]:
    """Return the low-bit matrices of ``model``, which may be a rank's part, grouped by kind of matmul (`Product`)."""
    found: dict[Product, list[LowBit]] = {}
    for weight, place in _weights(model):
        for part in weight.parts:
            found.setdefault(Product(part.layout, part.shape, place), []).append(part)
    return found


def set_tiles(model: Llama, tiles: Tiles) -> None:
    """Set the tiles of every low-bit matrix of a model. Matmuls that ``tiles`` does not list use the built-in tiles."""
    for weight, place in _weights(model):
        names = [str(Product(part.layout, part.shape, place)) for part in weight.parts]
        pairs = zip(weight.parts, names, strict=True)
        weight.parts = tuple(replace(part, tiles=tiles.get(name, {})) for part, name in pairs)


def _weights(model: Llama) -> Iterator[tuple[LinearWeight, Place]]:
    """Yield every linear layer with its `Place`: the operation that its matmul is fused with."""
    for layer in model.layers:
        yield layer.qkv, "norm"
        yield layer.gate_up, "gated" if len(layer.gate_up.parts) == 1 else "norm"  # two matrices: gating is separate
        yield layer.o, "add"
        yield layer.down, "add"
    yield model.head, "norm"


def measured(
    products: Mapping[Product, Sequence[LowBit]],
    dtype: torch.dtype,
    file: TileFile,
    on_progress: OnProgress,
    on_message: OnMessage,
    measure: Measure = low_bit_tuning.measure,
) -> Iterator[Timed]:
    """Measure tiles for these matmuls. Yield the fastest tile for each matmul and number of tokens.

    When the measurement ends, even by ctrl-c, the results so far are stored in ``file``.
    """
    found: dict[str, dict[int, Tile]] = {}

    def counter(label: str, unit: str) -> OnCount:
        return lambda done, total: on_progress(Progress(label, done, total, unit))

    compiling, timing = (
        counter("compiling kernels to measure", "kernels"),
        counter(f"measuring tiles for {file.card}", "tiles"),
    )
    try:
        for each in measure(products, dtype, compiling, timing):
            found.setdefault(str(each.product), {})[each.tokens] = each.tile
            yield each
    finally:
        file.add(found, on_message)


def choose_tiles(
    model: Llama,
    file: TileFile,
    ranks: Ranks | None,
    on_progress: OnProgress,
    on_message: OnMessage = ignore_message,
    measure: Measure = low_bit_tuning.measure,
) -> None:
    """Set the tiles of a model's low-bit matrices from ``file``.

    Missing tiles are measured, unless the built-in tiles were tuned for this card. With several ranks, rank 0 measures
    first. The other ranks read the results of rank 0, and measure only tiles that are still missing.
    """
    products, dtype = products_of(model), model.dtype
    if not products:
        return
    if ranks is not None and ranks.rank:
        ranks.least(0)  # wait until the first rank has written
    tiles = known(file.read(on_message), products, dtype)
    missing = {each: found for each, found in products.items() if str(each) not in tiles}
    if missing and file.card != RECORDED:
        on_message(
            f"{file.card}: measuring the fastest tiles for {len(missing)} kinds of low-bit matrices, once; "
            f"delete {file.path} to measure again"
        )
        for each in measured(missing, dtype, file, on_progress, on_message, measure):
            tiles.setdefault(str(each.product), {})[each.tokens] = each.tile
        torch.cuda.empty_cache()  # the pool will take all memory that is free
        if model.device.type == "cuda":
            free_stacks(model.device)
    set_tiles(model, tiles)
    if ranks is not None and not ranks.rank:
        ranks.least(0)


def known(tiles: Tiles, products: Iterable[Product], dtype: torch.dtype) -> dict[str, dict[int, Tile]]:
    """Return the measured tiles of the matmuls with complete measurements, by matmul and number of tokens.

    A measurement is complete if ``tiles`` has a valid tile for every bucket of token counts (see `buckets`).
    """

    def is_whole(product: Product) -> bool:
        found = tiles.get(str(product), {})
        return all(found.get(tokens) in candidates(product, tokens) for tokens in buckets(dtype))

    return {str(each): dict(tiles[str(each)]) for each in products if is_whole(each)}
