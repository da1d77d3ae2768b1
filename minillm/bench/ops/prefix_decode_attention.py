"""`minillm.kernels.prefix_decode_attention`: sequences behind one shared prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.bench.ops import DEVICE, DTYPE, HEAD_SHAPES, Case, random, relative_error
from minillm.bench.timing import copies_for_cold_l2
from minillm.kernels import AttentionShape, Pages, WorkList, plan_attention
from minillm.kernels.prefix_plan import FREE

# Sequences, tokens that all of them share, tokens of each one's own.
_CASES = ((32, 1024, 64), (32, 2048, 64), (32, 4096, 64), (256, 1024, 128), (256, 2048, 128), (256, 8192, 128))
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class SharedInputs:
    """A batch behind one prefix, in several copies that lie apart."""

    q: Tensor
    pages: list[Pages]  # of each copy, in one pool
    work: WorkList  # filled, for every copy alike
    bytes: int  # of one launch


def shared_inputs(
    shape: tuple[int, int, int], seqs: int, prefix: int, tail: int, *, planned_tail: int | None = None
) -> SharedInputs:
    """Inputs for ``seqs`` sequences of ``prefix`` shared tokens and ``tail`` of their own.

    Args:
        shape: query heads, kv heads, head dimension.
        planned_tail: tokens of the tails when the plan was made; by default as now.
    """
    heads, kv_heads, dim = shape
    shared, own = prefix // _BLOCK_SIZE, -(-tail // _BLOCK_SIZE)
    blocks = shared + seqs * own
    moved = blocks * _BLOCK_SIZE * kv_heads * dim * 2 * 2
    copies = min(24, copies_for_cold_l2(moved))
    k, v = (random(copies * blocks, _BLOCK_SIZE, kv_heads, dim) for _ in range(2))
    ids = torch.randperm(copies * blocks, device=DEVICE).int().view(copies, blocks)
    prefixes = ids[:, None, :shared].expand(copies, seqs, shared)
    tables = torch.cat((prefixes, ids[:, shared:].view(copies, seqs, own)), dim=2)
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    attention = AttentionShape(heads, kv_heads, dim, DTYPE.itemsize, processors)
    then = prefix + (tail if planned_tail is None else planned_tail)
    plan = plan_attention(tables[0].tolist(), [then] * seqs, _BLOCK_SIZE, attention, costs=FREE)
    assert plan is not None
    work = WorkList.allocate(seqs, attention, DEVICE)
    work.fill(plan)
    lens = torch.full((seqs,), prefix + tail, device=DEVICE, dtype=torch.int32)
    return SharedInputs(random(seqs, heads, dim), [Pages(k, v, each, lens) for each in tables], work, moved)


def prefix_attention() -> Iterator[Case]:
    for shape in HEAD_SHAPES:
        for seqs, prefix, tail in _CASES:
            yield _case(shape, seqs, prefix, tail)


def _case(shape: tuple[int, int, int], seqs: int, prefix: int, tail: int) -> Case:
    from minillm.kernels.decode_attention import paged_attention
    from minillm.kernels.prefix_decode_attention import prefix_attention

    heads, kv_heads, dim = shape
    inputs = shared_inputs(shape, seqs, prefix, tail)
    q, pages, scale = inputs.q, inputs.pages, dim**-0.5

    def launch(i: int) -> Tensor:
        return prefix_attention(q, pages[i % len(pages)], scale, inputs.work)

    def check() -> float:
        return relative_error(launch(0), paged_attention(q, pages[0], scale))  # which float64 has checked

    name = f"{heads}/{kv_heads} x {dim}, B{seqs} {prefix}+{tail}"
    return Case("prefix_attention", name, inputs.bytes, 4 * seqs * (prefix + tail) * heads * dim, launch, check)
