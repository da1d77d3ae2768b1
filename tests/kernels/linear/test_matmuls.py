"""All ways to multiply by a weight take the same arguments: see `LinearWeight.matmuls`."""

from __future__ import annotations

import pytest
import torch

from lib.kernels import DEVICE, TOLERANCE, randn, relative_error
from minillm import kernels
from minillm.kernels import GELU, LinearWeight, reference

pytest.importorskip("triton")
from minillm.kernels.linear import invariant, matvec

COMPUTE = {
    "matvec": kernels._by_matvec,
    "tensor cores": kernels._by_tensor_cores,
    "library": kernels._by_library,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", COMPUTE)
def test_every_kernel_takes_every_form(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (invariant, matvec):
        monkeypatch.setattr(kernels, module.__name__.rpartition(".")[2], module, raising=False)
    dtype = torch.bfloat16
    x, norm, matrix = randn(3, 64, dtype=dtype), randn(64, dtype=dtype), randn(32, 64, dtype=dtype) / 8
    offset, residual = randn(32, dtype=dtype) if bias else None, randn(3, 32, dtype=dtype)
    weight, compute = LinearWeight(matrix, offset), COMPUTE[name]
    wide, wide_norm, exact = x.double(), norm.double(), matrix.double()
    wide_offset = None if offset is None else offset.double()
    plain = torch.nn.functional.linear(wide, exact, wide_offset)
    normed = reference.norm_linear(wide, wide_norm, 1e-5, exact, wide_offset)
    gated = reference.norm_gated_linear(wide, wide_norm, 1e-5, exact, wide_offset)
    target = randn(3, 32, dtype=dtype)
    assert relative_error(compute(x, weight, None, None, False, False), plain) < TOLERANCE[dtype]
    assert compute(x, weight, target, (norm, 1e-5), False, False) is target
    assert relative_error(target, normed) < TOLERANCE[dtype]
    assert relative_error(compute(x, weight, None, (norm, 1e-5), True, False), gated) < TOLERANCE[dtype]
    gated = reference.gelu_mul(normed)
    assert relative_error(compute(x, weight, None, (norm, 1e-5), GELU, False), gated) < TOLERANCE[dtype]
    added = residual.clone()
    assert compute(x, weight, added, None, False, True) is added
    assert relative_error(added, plain + residual.double()) < TOLERANCE[dtype]


def test_only_large_16_bit_weights_use_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "has_large_shared_memory", lambda device: True)

    def is_fast(*shape: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return invariant.is_fast(torch.empty(shape, dtype=dtype, device="meta"))

    assert is_fast(4096, 4096)
    assert is_fast(6144, 4096, dtype=torch.float16)
    assert not is_fast(128256, 2048)
    assert not is_fast(2048, 8192)
    assert not is_fast(4096, 4096, dtype=torch.float32)
    monkeypatch.setattr(invariant, "has_large_shared_memory", lambda device: False)
    assert not is_fast(4096, 4096)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="lists the kernels of a GPU")
def test_the_last_kernel_takes_any_number_of_tokens() -> None:
    weight = LinearWeight(randn(32, 64, dtype=torch.bfloat16))
    assert weight.kernel_name(randn(1, 64, dtype=torch.bfloat16)) == "matvec"
    assert weight.kernel_name(randn(5000, 64, dtype=torch.bfloat16)) == "cuBLAS"
