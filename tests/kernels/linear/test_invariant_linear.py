"""Test batch-invariant matmuls against float64, and on a GPU with different numbers of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lib.kernels import DTYPES, TOLERANCE, combined, randn, relative_error

pytest.importorskip("triton")
from minillm.kernels.linear.invariant import Tile, product

FEW, SMALL, MANY = Tile(True, 16, 16, 32, 4, 2), Tile(True, 8, 16, 32, 2, 2), Tile(False, 16, 32, 16, 4, 2)
TWO_PARTS = Tile(False, 16, 32, 16, 4, 2, more=8)


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *, gated: bool) -> Tensor:
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    if gated:
        gate, up = exact.chunk(2, 1)
        exact = gate * gate.sigmoid() * up
    return exact if residual is None else exact + residual.double()


@pytest.mark.parametrize(
    ("dtype", "tile", "tokens", "shape", "gated", "add", "biased"),
    combined(
        DTYPES, [FEW, SMALL, MANY, TWO_PARTS], [1, 8, 9, 37], [(72, 80), (40, 64), (6, 200)], [False, True],
        [False, True], [False, True],
    ),
)  # fmt: skip
def test_products(
    dtype: torch.dtype, tile: Tile, tokens: int, shape: tuple[int, int], gated: bool, add: bool, biased: bool
) -> None:
    """Rows of the input and of the output lie apart; sizes are no multiples of a tile's."""
    features, columns = shape
    wide = features // 2 if gated else features
    x = randn(tokens, columns + 16, dtype=dtype)[:, :columns]
    weight, bias = randn(features, columns, dtype=dtype), randn(features, dtype=dtype) if biased else None
    target = randn(tokens, wide + 8, dtype=dtype)
    beside, residual = target[:, wide:].clone(), target[:, :wide].clone()
    exact = exact_product(x, weight, bias, residual if add else None, gated=gated)
    out = product(x, weight, bias, target[:, :wide], gated=gated, add=add, tile=tile)
    assert relative_error(out, exact) < TOLERANCE[dtype]
    assert torch.equal(target[:, wide:], beside)


@pytest.mark.parametrize("tile", [MANY, TWO_PARTS])
def test_many_tiles_of_one_program(tile: Tile) -> None:
    """There are more tiles than programs, and the last group of tiles is not full."""
    x, weight = randn(170, 48), randn(130, 48)
    out = product(x, weight, None, x.new_empty(170, 130), tile=tile)
    assert relative_error(out, x.double() @ weight.double().T) < TOLERANCE[torch.float32]


def test_what_does_not_fit_is_named() -> None:
    x, weight = randn(3, 64), randn(32, 64)
    for wrong in (
        lambda: product(x[:, ::2], weight[:, :32], None, x.new_empty(3, 32)),
        lambda: product(x, weight[:, ::2], None, x.new_empty(3, 32)),
        lambda: product(x, weight, None, x.new_empty(3, 16)),
        lambda: product(x.bfloat16(), weight, None, x.new_empty(3, 32)),
    ):
        with pytest.raises(ValueError, match="a matmul with"):
            wrong()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(576, 576), (4096, 4096), (1000, 1544), (960, 14336), (6144, 512), (28672, 256), (40000, 128)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_all_tiles_give_the_same_bits(shape: tuple[int, int], gated: bool) -> None:
    from triton.runtime.errors import OutOfResources

    from lib.invariant_candidates import CANDIDATES

    features, columns = shape
    x, weight = randn(300, columns, dtype=torch.bfloat16), randn(features, columns, dtype=torch.bfloat16)
    bias, residual = randn(features, dtype=torch.bfloat16), randn(300, features // (1 + gated), dtype=torch.bfloat16)

    def rows(start: int, end: int, tile: Tile | None) -> Tensor:
        return product(x[start:end], weight, bias, residual[start:end].clone(), gated=gated, add=True, tile=tile)

    alone = torch.cat([rows(i, i + 1, None) for i in range(300)])
    for tokens in (2, 8, 9, 16, 17, 40, 64, 65, 96, 97, 128, 129, 150, 192, 193, 256, 300):
        assert torch.equal(rows(0, tokens, None), alone[:tokens])
        assert torch.equal(rows(300 - tokens, 300, None), alone[300 - tokens :])
    for tile in CANDIDATES:
        for tokens in (3, 300):
            try:
                assert torch.equal(rows(0, tokens, tile), alone[:tokens]), tile
            except OutOfResources:
                continue
