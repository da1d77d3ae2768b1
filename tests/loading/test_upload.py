"""Test copies of weights to a device against torch's own copies."""

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
    with uploads(torch.device(device)) as copy:
        for part in parts:
            expected, target = (torch.empty(part.shape, dtype=torch.bfloat16, device=device) for _ in range(2))
            copy(target, part)
            assert torch.equal(target, expected.copy_(part))


@pytest.mark.gpu
def test_a_copy_waits_for_work_that_reads_the_same_memory() -> None:
    target = torch.zeros(4096, 4096, device="cuda")
    with uploads(torch.device("cuda", 0)) as copy:
        torch.cuda._sleep(100_000_000)
        before = target.sum()
        copy(target, torch.ones(4096, 4096))
    assert before == 0
    assert target.sum() == target.numel()
