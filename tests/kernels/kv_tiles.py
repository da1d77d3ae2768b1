"""Decode attention over a cache in 8 bits, in tiles of several sizes, on a GPU: what `decode_attention.tiling` says.

PYTHONPATH=. python tests/kernels/kv_tiles.py
"""

from __future__ import annotations

from itertools import product

from minillm.bench.ops import paged_attention
from minillm.kernels import decode_attention
from minillm.kernels.timing import graph_microseconds

SHAPES = (((32, 8, 128), 64, 4096), ((32, 8, 128), 1, 8192), ((32, 8, 64), 64, 4096), ((32, 32, 128), 64, 1024))


def main() -> None:
    for heads, seqs, context in SHAPES:
        plain = graph_microseconds(paged_attention(heads, seqs, context).launch, 8)
        print(f"{heads} B{seqs} c{context}: 16 bits {plain:.1f} us")
        chosen = decode_attention.tiling
        for tiling in product((32, 64, 128), (2, 3, 5, 7), (2, 4, 8)):
            case = paged_attention(heads, seqs, context, in_8_bits=True)
            decode_attention.tiling = lambda *_, tiling=tiling: tiling
            try:
                error, microseconds = case.error(), graph_microseconds(case.launch, 8)
                print(f"  tokens, stages, warps {tiling}: {microseconds:.1f} us, error {error:.1e}", flush=True)
            except Exception as failed:  # too much shared memory
                print(f"  {tiling}: {type(failed).__name__}", flush=True)
            finally:
                decode_attention.tiling = chosen


if __name__ == "__main__":
    main()
