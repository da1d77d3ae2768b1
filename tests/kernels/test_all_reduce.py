"""Test the one-shot all-reduce: one rank with fake messages of the others, and on a GPU concurrent ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lib.kernels import DEVICE, DTYPES, ON_GPU, TOLERANCE, randn, relative_error
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.all_reduce import WORDS, Exchange, all_reduce, inbox_words, slice_of

CAPACITY = 4 * WORDS


def exchanges(ranks: int, capacity: int = CAPACITY, shots: int = 1) -> tuple[list[Exchange], list[Tensor]]:
    """The exchange of each rank, and their inboxes, all on one device."""
    inboxes = [torch.zeros(inbox_words(ranks, capacity, shots), dtype=torch.int64, device=DEVICE) for _ in range(ranks)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=DEVICE)

    def zeros(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=DEVICE)

    made = [Exchange(rank, addresses, zeros(capacity // WORDS), zeros(1), shots) for rank in range(ranks)]
    return made, inboxes


def place(inbox: Tensor, ranks: int, number: int, source: int) -> Tensor:
    """The part of the inbox that holds the words from ``source`` for the ``number``-th sum."""
    return inbox.view(2, ranks, -1)[number % 2, source]


def message(x: Tensor, number: int) -> Tensor:
    words = x.reshape(-1).view(torch.int32).to(torch.int64)
    return (words & 0xFFFFFFFF) | (number << 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_sends_its_part_and_adds_up_what_arrives(dtype: torch.dtype, ranks: int) -> None:
    for rank in range(ranks):
        made, inboxes = exchanges(ranks)
        numbers = [0] * (CAPACITY // WORDS)  # of the sums that each program has done
        for shape in ((1, 576), (3, 600), (1, 2), (2, 1024), (1, 576)):
            parts = [randn(*shape, dtype=dtype) for _ in range(ranks)]
            programs = -(-parts[0].numel() * dtype.itemsize // (4 * WORDS))
            for program in range(programs):
                numbers[program] += 1
                piece = slice(program * WORDS, (program + 1) * WORDS)
                for source in range(ranks):
                    if source != rank:
                        words = message(parts[source], numbers[program])[piece]
                        place(inboxes[rank], ranks, numbers[program], source)[piece][: len(words)] = words
            x = parts[rank].clone()
            assert all_reduce(x, made[rank]) is x
            expected = reference.all_reduce(parts)
            if ON_GPU or dtype != torch.bfloat16:  # the interpreter truncates a bfloat16 where hardware rounds
                assert torch.equal(x, expected)
            assert relative_error(x, torch.stack(parts).double().sum(0)) < TOLERANCE[dtype]
            for program in range(programs):
                piece = slice(program * WORDS, (program + 1) * WORDS)
                words = message(parts[rank], numbers[program])[piece]
                for peer in range(ranks):
                    if peer != rank:
                        sent = place(inboxes[peer], ranks, numbers[program], rank)[piece][: len(words)]
                        assert torch.equal(sent, words)
        assert made[rank].sums.tolist() == numbers


def slice_messages(
    sent: Tensor, owner: int, inbox: Tensor, source: int, shot: int, numbers: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each program, the words of ``owner``'s slice and their place in ``source``'s part of the inbox."""
    ranks = inbox.numel() // (4 * WORDS * len(numbers))
    length = slice_of(sent.numel() * sent.itemsize // 4, ranks)
    for program in range(-(-length // WORDS)):
        first, last = program * WORDS, min((program + 1) * WORDS, length)
        words = message(sent, numbers[program])[owner * length + first : owner * length + last]
        place = inbox.view(2, ranks, 2, -1)[numbers[program] % 2, source, shot]
        yield words, place[first : first + len(words)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_in_two_shots_a_rank_adds_up_its_slice_and_sends_the_sum(dtype: torch.dtype, ranks: int) -> None:
    capacity, per_word = 2 * WORDS, 4 // dtype.itemsize
    most = per_word * capacity * ranks
    for rank in range(ranks):
        made, inboxes = exchanges(ranks, capacity, shots=2)
        exchange, numbers = made[rank], [0] * (capacity // WORDS)

        for size in (most, 576, 2, most // 2 + 6 * per_word, most):
            parts = [randn(1, size, dtype=dtype) for _ in range(ranks)]
            expected = reference.all_reduce(parts)
            length = slice_of(size // per_word, ranks)
            for program in range(-(-length // WORDS)):
                numbers[program] += 1
            others = [each for each in range(ranks) if each != rank]
            for source in others:
                for shot, sent, owner in ((0, parts[source], rank), (1, expected, source)):
                    for words, place in slice_messages(sent, owner, inboxes[rank], source, shot, numbers):
                        place.copy_(words)
            x = parts[rank].clone()
            assert all_reduce(x, exchange) is x
            assert relative_error(x, torch.stack(parts).double().sum(0)) < TOLERANCE[dtype]
            if ON_GPU or dtype != torch.bfloat16:
                assert torch.equal(x, expected)
            for peer in others:
                for shot, sent, owner in ((0, parts[rank], peer), (1, x, rank)):
                    for words, got in slice_messages(sent, owner, inboxes[peer], rank, shot, numbers):
                        assert torch.equal(got, words)
        assert exchange.sums.tolist() == numbers
    assert exchange.takes(torch.zeros(most, dtype=dtype))
    assert not exchange.takes(torch.zeros(most + per_word, dtype=dtype))
    with pytest.raises(ValueError, match="two shots"):
        all_reduce(torch.zeros(4, dtype=torch.float64), exchange)


def test_stop_ends_the_wait_for_a_word_that_does_not_come() -> None:
    made, inboxes = exchanges(2)
    x = torch.ones(1, 64, device=DEVICE)
    place(inboxes[0], 2, 1, 1)[:64] = message(torch.ones(64, device=DEVICE), 3)  # of the turn's next sum but one
    made[0].stop.fill_(1)
    all_reduce(x, made[0])  # without `stop` this would never end
    assert made[0].sums[0] == 1


def test_the_count_of_sums_goes_round() -> None:
    made, inboxes = exchanges(2)
    made[1].sums.fill_(-1)  # 2^32 - 1 sums are done: the next one is number 0
    x = torch.full((1, 64), 2.0, device=DEVICE)
    place(inboxes[1], 2, 0, 0)[:64] = message(torch.ones(64, device=DEVICE), 0)
    assert (all_reduce(x, made[1]) == 3).all()
    assert made[1].sums[0] == 0


def test_what_it_takes() -> None:
    (exchange, _), _ = exchanges(2)
    assert exchange.capacity == CAPACITY
    assert exchange.takes(torch.zeros(CAPACITY))
    assert not exchange.takes(torch.zeros(CAPACITY + 1))
    assert exchange.takes(torch.zeros(2 * CAPACITY, dtype=torch.bfloat16))
    assert not exchange.takes(torch.zeros(3, dtype=torch.bfloat16)), "half a word"
    assert not exchange.takes(torch.zeros(4, 4)[:, :2]), "not contiguous"
    assert not exchange.takes(torch.zeros(4, dtype=torch.int32))
    assert not exchange.takes(torch.zeros(0))
    with pytest.raises(ValueError, match="one shot"):
        all_reduce(torch.zeros(4, dtype=torch.float64), exchange)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs programs that run at once")
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_that_run_at_once(dtype: torch.dtype) -> None:
    """Run many sums of all sizes on streams of one GPU, one after another, and replayed from graphs.

    There are two ranks: more streams may share one of the hardware's queues, where one would block another.
    """
    ranks = 2
    made, inboxes = exchanges(ranks)
    for exchange in made:  # loaded beforehand: loading waits for kernels that run, and those would wait for it
        exchange.stop.fill_(1)
        all_reduce(randn(CAPACITY, dtype=dtype), exchange)
        torch.cuda.synchronize()
    for tensor in (*inboxes, *(exchange.sums for exchange in made), *(exchange.stop for exchange in made)):
        tensor.zero_()
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    generator = torch.Generator().manual_seed(0)
    sizes = [2 * int(size) for size in torch.randint(1, CAPACITY // 2, (60,), generator=generator)]
    parts = [[randn(size, dtype=dtype) for _ in range(ranks)] for size in sizes]
    results = [[part.clone() for part in each] for each in parts]
    torch.cuda.synchronize()
    for rank in reversed(range(ranks)):
        with torch.cuda.stream(streams[rank]):
            for result in results:
                all_reduce(result[rank], made[rank])
    torch.cuda.synchronize()
    for part, result in zip(parts, results, strict=True):
        for rank in range(ranks):
            assert torch.equal(result[rank], reference.all_reduce(part))
    graphs = []
    for rank in range(ranks):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            for result in results:
                all_reduce(result[rank], made[rank])
        graphs.append(graph)
    for _ in range(5):
        for result, part in zip(results, parts, strict=True):
            for rank in range(ranks):
                result[rank].copy_(part[rank])
        torch.cuda.synchronize()
        for rank in range(ranks):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
        torch.cuda.synchronize()
        for part, result in zip(parts, results, strict=True):
            for rank in range(ranks):
                assert torch.equal(result[rank], reference.all_reduce(part))
