"""`minillm.kernels.decode_attention`, over one shuffled pool."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minillm.bench.ops import DEVICE, HEAD_SHAPES, Case, random, relative_error
from minillm.bench.timing import copies_for_cold_l2
from minillm.kernels import Pages, reference

_CASES = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (64, 1024), (64, 4096), (256, 1024))


def paged_attention() -> Iterator[Case]:
    for heads in HEAD_SHAPES:
        for seqs, context in _CASES:
            yield _case(heads, seqs, context, 16)
        for block_size in (1, 256):
            yield _case(heads, 64, 4096, block_size)
        yield _case(heads, 64, 4096, 16, shuffled=False)


def _case(shape: tuple[int, int, int], seqs: int, context: int, block_size: int, shuffled: bool = True) -> Case:
    from minillm.kernels.decode_attention import paged_attention

    heads, kv_heads, dim = shape
    moved, scale = seqs * context * kv_heads * dim * 2 * 2, dim**-0.5
    blocks = context // block_size
    copies = copies_for_cold_l2(moved)
    num_blocks = copies * seqs * blocks
    q, k, v = random(seqs, heads, dim), *(random(num_blocks, block_size, kv_heads, dim) for _ in range(2))
    ids = torch.randperm(num_blocks, device=DEVICE) if shuffled else torch.arange(num_blocks, device=DEVICE)
    lens = torch.full((seqs,), context, device=DEVICE, dtype=torch.int32)
    pages = [Pages(k, v, tables, lens) for tables in ids.int().view(copies, seqs, blocks)]

    def check() -> float:
        some = slice(0, min(seqs, 4))
        wanted = pages[0].tables[some].long()
        renumbered = torch.arange(wanted.numel(), device=DEVICE).view_as(wanted)
        double = Pages(k[wanted.flatten()].double(), v[wanted.flatten()].double(), renumbered, lens[some])
        exact = reference.paged_attention(q[some].double(), double, scale)
        return relative_error(paged_attention(q, pages[0], scale)[some], exact)

    name = f"{heads}/{kv_heads} x {dim}, B{seqs} c{context}, block {block_size}{'' if shuffled else ' contiguous'}"
    return Case(
        "paged_attention",
        name,
        moved,
        4 * seqs * context * heads * dim,
        lambda i: paged_attention(q, pages[i % copies], scale),
        check,
        launches=24 if moved < 1 << 28 else 8,
    )
