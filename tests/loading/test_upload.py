"""Test copies of weights to a device against torch's own copies."""

import numpy as np
import pytest
import torch

from minillm.loading.upload import uploads

SHAPES = [(5000, 1024), (3, 2_000_000), (7, 9), (1 << 20,)]  # many pieces, a row above a piece, small, a vector


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_are_those_of_torch(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randn(shape).to(dtype)
    parts = [source, source[..., 3:], source.to(device)]
    targets = [torch.empty(part.shape, dtype=torch.bfloat16, device=device) for part in parts]
    with uploads(torch.device(device)) as copy:
        for target, part in zip(targets, parts, strict=True):
            copy(target, part)
    for target, part in zip(targets, parts, strict=True):
        assert torch.equal(target, torch.empty_like(target).copy_(part))


@pytest.mark.gpu
def test_a_copy_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise OSError("the disk has failed")

    monkeypatch.setattr(np, "copyto", fail)
    with pytest.raises(OSError, match="has failed"), uploads(torch.device("cuda", 0)) as copy:
        copy(torch.empty(4096, 4096, device="cuda"), torch.ones(4096, 4096))


@pytest.mark.gpu
def test_a_copy_waits_for_work_that_reads_the_same_memory() -> None:
    target = torch.zeros(4096, 4096, device="cuda")
    with uploads(torch.device("cuda", 0)) as copy:
        torch.cuda._sleep(100_000_000)
        before = target.sum()
        copy(target, torch.ones(4096, 4096))
    assert before == 0
    assert target.sum() == target.numel()
