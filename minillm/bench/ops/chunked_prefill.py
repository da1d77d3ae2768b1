"""`minillm.kernels.chunked_prefill`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minillm.bench.ops import DEVICE, HEAD_SHAPES, Case, random, relative_error
from minillm.kernels import Pages, reference

_CASES = (((8192,), 0), ((2048,), 0), ((2048,), 6144), ((512,) * 16, 0), ((64,) * 32, 2048))  # chunks, tokens cached
_BLOCK_SIZE = 16


def prefill_attention() -> Iterator[Case]:
    for shape in HEAD_SHAPES:
        for chunks, cached in _CASES:
            yield _case(shape, chunks, cached)


def _case(shape: tuple[int, int, int], chunks: tuple[int, ...], cached: int) -> Case:
    from minillm.kernels.chunked_prefill import prefill_attention

    heads, kv_heads, dim = shape
    context, n, scale = chunks[0] + cached, len(chunks), dim**-0.5
    blocks = -(-context // _BLOCK_SIZE)
    k, v = (random(n * blocks, _BLOCK_SIZE, kv_heads, dim) for _ in range(2))
    tables = torch.randperm(n * blocks, device=DEVICE).int().view(n, blocks)
    lens = torch.full((n,), context, device=DEVICE, dtype=torch.int32)
    pages = Pages(k, v, tables, lens)
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], device=DEVICE, dtype=torch.int32)
    q = random(sum(chunks), heads, dim)

    def launch(i: int) -> torch.Tensor:
        return prefill_attention(q, pages, starts, scale)

    def check() -> float:
        one = Pages(k[:, :, :1].double(), v[:, :, :1].double(), tables, lens)  # the first kv head's first query head
        exact = reference.prefill_attention(q[:, :1].double(), one, starts, scale)
        return relative_error(launch(0)[:, :1], exact)

    visible = sum(count * cached + count * (count + 1) // 2 for count in chunks)
    return Case(
        "prefill_attention",
        f"{heads}/{kv_heads} x {dim}, {n} x {chunks[0]} after {cached}",
        (q.numel() * 2 + n * context * kv_heads * dim * 2) * 2,
        4 * visible * heads * dim,
        launch,
        check,
        launches=8,
    )
