"""Tile sizes of the batch-invariant matmuls: the choices of `tile_for`, and sizes close to them."""

import torch
from torch import Tensor

from minillm.kernels.linear.invariant import Tile

CANDIDATES = [
    *(
        Tile(True, 8, rows, columns, warps, stages, 1024)
        for rows, columns, warps, stages in (
            (16, 512, 2, 4), (16, 512, 2, 5), (16, 512, 1, 4), (16, 1024, 2, 3), (32, 512, 4, 4), (32, 256, 2, 5),
            (64, 128, 4, 4), (128, 64, 4, 5),
        )
    ),
    *(
        Tile(True, 16, rows, columns, warps, stages, ahead)
        for rows, columns, warps, stages, ahead in (
            (16, 256, 2, 5, 1024), (16, 512, 2, 4, 1024), (32, 256, 4, 4, 512), (32, 128, 4, 4, 0), (16, 256, 2, 4, 0),
        )
    ),
    Tile(True, 64, 64, 128, 4, 4, 512),
    Tile(True, 64, 64, 128, 4, 3, 512),
    Tile(True, 64, 32, 64, 4, 3),
    Tile(True, 128, 128, 64, 8, 3),
    *(
        Tile(False, tokens, rows, columns, warps, stages)
        for tokens, rows, columns, warps, stages in (
            (64, 32, 128, 4, 4), (64, 64, 128, 4, 4), (64, 128, 128, 4, 3), (128, 64, 128, 4, 4), (128, 128, 64, 8, 4),
            (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (256, 64, 64, 8, 4),
        )
    ),
    *(
        Tile(False, tokens, rows, columns, warps, stages, more=more)
        for tokens, more, rows, columns, warps, stages in (
            (64, 32, 128, 64, 8, 4), (64, 32, 64, 128, 4, 4), (64, 32, 64, 128, 4, 3), (128, 32, 128, 64, 8, 3),
            (128, 64, 128, 64, 8, 3), (128, 64, 128, 64, 8, 4), (128, 64, 64, 128, 4, 3),
        )
    ),
]  # fmt: skip


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
