"""Test the tuning of low-bit matmuls: every candidate is right, and the fastest by a fake clock is chosen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lib.kernels import DEVICE, ON_GPU, relative_error
from lib.low_bit import LAYOUTS, some
from minillm.kernels import reference
from minillm.kernels.linear.low_bit.layouts import UNPACKED, LowBit, bucket, dequantize

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from minillm.kernels.linear.low_bit import choose as low_bit_linear
from minillm.kernels.linear.low_bit import few_tokens as low_bit_matmul
from minillm.kernels.linear.low_bit import one_token as low_bit_matvec
from minillm.kernels.linear.low_bit import tuning as low_bit_tuning
from minillm.kernels.linear.low_bit.tuning import Job, Place, Product, buckets, candidates, fastest, launcher, prepared

Q4 = Product(LAYOUTS["q4_k"], (32, 256), "add")
HALF = torch.bfloat16


def test_every_number_of_tokens_has_a_bucket_that_is_measured() -> None:
    assert {bucket(tokens) for tokens in range(1, 65)} == set(buckets(HALF))
    assert [bucket(tokens) for tokens in (1, 2, 3, 8, 9, 33)] == [1, 2, 8, 8, 16, 64]
    assert buckets(torch.float32) == (1, 2), "in float32 more than two tokens unpack"


@pytest.mark.parametrize("shape", [(512, 2048), (28672, 4096), (4096, 14336), (128256, 4096), (96, 64)])
def test_candidates_are_few_and_the_rule_is_the_first(shape: tuple[int, int]) -> None:
    product = Product(LAYOUTS["q6_k"], shape, "norm")
    for tokens in buckets(HALF):
        found = candidates(product, tokens)
        assert len(found) == len(set(found)) <= 10
        assert all(type(number) is int and number > 0 for tile in found for number in tile)
        if tokens <= 2:
            assert found[0] == low_bit_matvec.tile_for(tokens, product.layout, shape[1] // 32, shape[0])
            assert {len(tile) for tile in found} == {3}
        else:
            assert found[0] == low_bit_matmul.tile_for(tokens, *shape)
            assert found[-1] == UNPACKED


@pytest.mark.parametrize("place", ["norm", "gated", "add"])
@pytest.mark.parametrize("tokens", [2, 8])
def test_candidates_compute_the_product(place: Place, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare each candidate with float64 of the dequantized weights."""
    for kernel in (low_bit_matvec, low_bit_matmul):
        monkeypatch.delattr(kernel, "tile_for")  # no tile falls back to the rule
    matrix = some(LAYOUTS["q4_k"], 32, 256)
    weight = dequantize(matrix, torch.float64)
    x = torch.linspace(-1, 1, tokens * 256).view(-1, 256).half().to(DEVICE)  # as the candidates are given
    product = Product(matrix.layout, (32, 256), place)
    exact = functional.linear(x.double(), weight)
    if place != "add":
        exact = reference.norm_linear(x.double(), torch.ones(256, device=DEVICE).double(), 1e-5, weight)
    if place == "gated":
        gate, up = exact.chunk(2, -1)
        exact = functional.silu(gate) * up
    tiles = [(16, 1, 2), (32, 4, 1)] if tokens == 2 else [(4, 1, 1, 1), (2, 2, 1, 2), UNPACKED]
    for tile in tiles:
        assert relative_error(launcher(Job(product, tokens, tile), [matrix], torch.float16)(0), exact) < 3e-3, tile


def test_a_tile_that_says_unpacked_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[LowBit] = []
    plain = low_bit_linear.dequantize

    def dequantize(matrix: LowBit, out: Tensor) -> Tensor:
        unpacked.append(matrix)
        return plain(matrix, out)

    monkeypatch.setattr(low_bit_linear, "dequantize", dequantize)
    matrix = some(LAYOUTS["q4_k"], 32, 256)
    places: tuple[Place, ...] = ("norm", "gated", "add")
    for tile, place in itertools.product(((4, 1, 1, 1), UNPACKED), places):
        unpacked.clear()
        launcher(Job(Product(matrix.layout, (32, 256), place), 8, tile), [matrix], HALF)(0)
        assert len(unpacked) == (tile == UNPACKED), (tile, place)


def clock_of(times: dict[Job, float], monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """A clock that says these times, without a launch, and asserts that launches have enough matrices."""
    monkeypatch.setattr(low_bit_tuning, "launcher", lambda job, matrices, dtype: (job, len(matrices)))

    def clock(launch: tuple[Job, int], launches: int) -> float:
        job, count = launch
        assert count == launches
        return times[job]

    return clock


def test_the_fastest_candidate_of_each_number_of_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Product(LAYOUTS["q6_k"], (64, 256), "gated")
    products = {Q4: [some(Q4.layout, 32, 256)], gated: [some(gated.layout, 64, 256)] * 80}
    jobs = [
        Job(each, tokens, tile) for each in products for tokens in buckets(HALF) for tile in candidates(each, tokens)
    ]
    generator = torch.Generator().manual_seed(0)
    times = dict(zip(jobs, (1 + torch.rand(len(jobs), generator=generator)).tolist(), strict=True))
    counts: list[tuple[int, int]] = []
    found = list(fastest(jobs, products, HALF, clock_of(times, monkeypatch), lambda *count: counts.append(count)))
    assert counts == [(done, len(jobs)) for done in range(1, len(jobs) + 1)]
    assert [(each.product, each.tokens) for each in found] == list(itertools.product(products, buckets(HALF)))
    for each in found:
        rivals = {job: time for job, time in times.items() if job[:2] == each[:2]}
        assert times[Job(*each[:3])] == each.microseconds == min(rivals.values())


def test_of_equals_the_recorded_rule_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job(Q4, tokens, tile) for tokens in buckets(HALF) for tile in candidates(Q4, tokens)]
    clock = clock_of(dict.fromkeys(jobs, 3.0), monkeypatch)
    for each in fastest(jobs, {Q4: [some(Q4.layout, 32, 256)]}, HALF, clock):
        assert each.tile == candidates(Q4, each.tokens)[0]


def test_each_kernel_is_compiled_once_and_what_does_not_fit_the_card_is_no_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Job] = []

    def launch(job: Job) -> None:
        ran.append(job)
        if len(job.tile) == 4 and job.tile[2] == 4:
            raise OutOfResources(100_000, 65_536, "shared memory")

    monkeypatch.setattr(low_bit_tuning, "launcher", lambda job, matrices, dtype: lambda i: launch(job))
    wide = Product(Q4.layout, (64, 256), "add")  # the same kernels
    products = {each: [some(each.layout, *each.shape)] for each in (Q4, wide)}
    counts: list[tuple[int, int]] = []
    jobs = prepared(products, HALF, lambda *count: counts.append(count))
    assert len(ran) == len({job.kernel for job in ran}) == len(counts) == counts[-1][1]
    assert {job.product for job in jobs} == set(products)
    for product in products:
        assert [job.tile for job in jobs if job[:2] == (product, 1)] == candidates(product, 1)
        assert UNPACKED in [job.tile for job in jobs if job[:2] == (product, 64)]
    assert not [job for job in jobs if len(job.tile) == 4 and job.tile[2] == 4]


def test_ctrl_c_while_compiling_begins_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Job] = []

    def launch(job: Job) -> None:
        ran.append(job)
        time.sleep(0.1)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(low_bit_tuning, "launcher", lambda job, matrices, dtype: lambda i: launch(job))
    with pytest.raises(KeyboardInterrupt):
        prepared({Q4: [some(Q4.layout, 32, 256)]}, HALF, interrupt)
    jobs = [Job(Q4, tokens, tile) for tokens in buckets(HALF) for tile in candidates(Q4, tokens)]
    assert 0 < len(ran) < len({job.kernel for job in jobs if job.tile != UNPACKED})


def test_matrices_follow_each_other_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own, copies where it has too few of them, and of many the first."""
    own = [some(Q4.layout, 32, 256, seed) for seed in range(80)]
    taken: list[Sequence[LowBit]] = []
    monkeypatch.setattr(low_bit_tuning, "launcher", lambda job, matrices, dtype: taken.append(matrices))
    for count in (1, 3, 80):
        list(fastest([Job(Q4, 1, (1, 1, 16))], {Q4: own[:count]}, HALF, lambda launch, launches: float(launches)))
    one, three, many = taken
    if not ON_GPU:
        assert (len(one), len(three), len(many)) == (4, 4, 4)
    assert [each.levels.data_ptr() for each in three[:3]] == [each.levels.data_ptr() for each in own[:3]]
    assert len({each.levels.data_ptr() for each in one}) == len(one)
    assert all(torch.equal(each.levels, own[0].levels) for each in one)
