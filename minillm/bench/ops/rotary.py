"""`minillm.kernels.rotary`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minillm.bench.ops import DEVICE, DTYPE, Case, random, relative_error
from minillm.bench.timing import copies_for_cold_l2
from minillm.kernels import Places, reference

_HEADS, _KV_HEADS, _DIM, _BLOCK_SIZE = 32, 8, 128, 16


def rotary_write_kv() -> Iterator[Case]:
    for tokens in (1, 64, 8192):
        yield _case(tokens)


def _case(tokens: int) -> Case:
    from minillm.kernels.rotary import rotary_write_kv

    moved = 2 * (_HEADS + 2 * _KV_HEADS) * _DIM * tokens * 2
    packed = [random(tokens, _HEADS + 2 * _KV_HEADS, _DIM) for _ in range(copies_for_cold_l2(moved))]
    angles = torch.randn(tokens, _DIM // 2, device=DEVICE)
    num_blocks = max(64, 2 * tokens // _BLOCK_SIZE)
    caches = [torch.zeros(num_blocks, _BLOCK_SIZE, _KV_HEADS, _DIM, device=DEVICE, dtype=DTYPE) for _ in range(2)]
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=DEVICE)[:tokens]
    places = Places(angles.cos(), angles.sin(), slots)

    def launch(i: int) -> None:
        q, k, v = packed[i % len(packed)].split((_HEADS, _KV_HEADS, _KV_HEADS), dim=1)
        rotary_write_kv(q, k, v, places, *caches)

    def check() -> float:
        k = packed[0][:, _HEADS : _HEADS + _KV_HEADS].double()
        launch(0)
        return relative_error(caches[0].flatten(0, 1)[slots], reference.rotary(k, places.cos, places.sin))

    return Case("rotary_write_kv", f"{tokens} tokens, {_HEADS}/{_KV_HEADS} x {_DIM}", moved, 0, launch, check)
