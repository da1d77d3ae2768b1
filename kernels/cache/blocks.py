"""Copy whole blocks, K and V of every layer, in one launch: for copy-on-write and swapping.

``block_copy`` copies blocks within the pool; ``gather_blocks`` and ``scatter_blocks`` move them to and from a staging
buffer, on the device or in pinned host memory. Bytes: each block is read once and written once. Memory-bound
(PCIe-bound with a staging buffer in host memory). Grid: (blocks, 2 * layers, pieces of a block). Tile: 8 kB, 16 bytes
per thread and load, as 32-bit words for every dtype. Offsets are 64-bit. An 8-bit pool has a second tensor, for the
scales, and each of its two tensors takes a launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import cdiv, next_power_of_2
from minillm.kernels.launch import launched

_TILE_WORDS = 2048


@launched
@triton.jit
def _move_blocks_kernel(
    target_ptr, source_ptr, target_ids_ptr, source_ids_ptr, ids_stride,
    target_plane_stride, source_plane_stride, target_block_stride, source_block_stride, words,
    TARGET_BY_ID: tl.constexpr, SOURCE_BY_ID: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Move one piece of block ``number``, in one plane: the K or V of one layer.

    With TARGET_BY_ID or SOURCE_BY_ID, that side's block id is entry ``number`` of its id list. Otherwise, it is
    ``number`` itself.
    """
    number = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(2) * TILE + tl.arange(0, TILE)
    source, target = number, number
    if SOURCE_BY_ID:
        source = tl.load(source_ids_ptr + number * ids_stride).to(tl.int64)
    if TARGET_BY_ID:
        target = tl.load(target_ids_ptr + number * ids_stride).to(tl.int64)
    mask = offsets < tl.where(source >= 0, words, 0)
    data = tl.load(source_ptr + plane * source_plane_stride + source * source_block_stride + offsets, mask=mask)
    tl.store(target_ptr + plane * target_plane_stride + target * target_block_stride + offsets, data, mask=mask)


def _as_words(tensor: Tensor) -> Tensor:
    """View a contiguous pool or staging buffer as int32. The last of four dimensions has the words of one block."""
    if not tensor.is_contiguous():
        raise ValueError("pool and staging buffer must be contiguous")
    return tensor.flatten(3).view(torch.int32)


def _move(target: Tensor, source: Tensor, target_ids: Tensor | None, source_ids: Tensor | None) -> None:
    """Move blocks between ``[planes, blocks, words]`` views. A plane is the K or V of one layer.

    ``target_ids`` and ``source_ids`` list the blocks to write and to read, in the same order. A side whose list is None
    uses blocks 0, 1, 2 and so on.
    """
    ids = target_ids if target_ids is not None else source_ids
    assert ids is not None
    if not ids.shape[0]:
        return
    words = target.shape[2]
    tile = min(_TILE_WORDS, next_power_of_2(words))
    _move_blocks_kernel[(ids.shape[0], target.shape[0], cdiv(words, tile))](
        target, source, target_ids if target_ids is not None else ids, source_ids if source_ids is not None else ids,
        ids.stride(0), target.stride(0), source.stride(0), target.stride(1), source.stride(1), words,
        TARGET_BY_ID=target_ids is not None, SOURCE_BY_ID=source_ids is not None, TILE=tile, num_warps=4,
    )  # fmt: skip


def block_copy(kv_cache: Tensor, copies: Tensor) -> None:
    """Copy blocks within the pool: see `reference.block_copy`. Raises ValueError unless the pool is contiguous."""
    pool = _as_words(kv_cache).flatten(0, 1)
    _move(pool, pool, copies[:, 1], copies[:, 0])


def gather_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy blocks from the pool to the staging buffer: see `reference.gather_blocks`.

    Raises ValueError for a wrong shape or layout.
    """
    _move(_planes_of(staging, kv_cache, block_ids), _as_words(kv_cache).flatten(0, 1), None, block_ids)


def scatter_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy blocks from the staging buffer to the pool: see `reference.scatter_blocks`.

    Raises ValueError for a wrong shape or layout.
    """
    _move(_as_words(kv_cache).flatten(0, 1), _planes_of(staging, kv_cache, block_ids), block_ids, None)


def _planes_of(staging: Tensor, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
    """View ``staging`` as ``[planes, blocks, words]``.

    Raises ValueError if ``staging`` does not fit the pool or the block ids.
    """
    expected = (*kv_cache.shape[:2], *kv_cache.shape[3:])
    if staging.shape[1:] != expected or staging.shape[0] < block_ids.shape[0] or staging.dtype != kv_cache.dtype:
        raise ValueError(
            f"staging must be {kv_cache.dtype} [>= {block_ids.shape[0]}, {', '.join(map(str, expected))}], "
            f"not {staging.dtype} {tuple(staging.shape)}"
        )
    return _as_words(staging).flatten(1, 2).transpose(0, 1)
