"""``memory``: what paging and sharing save, replayed on the books of the cache alone.

Lengths look like those of Kwon et al. 2023, figure 11: means of 19.3 prompt and 58.5 output tokens for Alpaca, 161.3
and 338.0 for ShareGPT. The figure gives means only; the spread is an assumption: log-normal with sigma 0.8 for Alpaca
and 1.1 for ShareGPT, cut to 1 … 2048 tokens together. A batch of sequences at all stages of their lives runs for some
thousand steps, and slots are counted at every one.

How beams die is simulated: the next token's log-probabilities of each beam fall as those of a Zipf distribution with
exponent 1.5, with Gumbel noise of scale 0.5, and the best ``width`` of all continuations live on. With a model it is
the model's own choice, on prompts of `INSTRUCTIONS` cut to the same lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import Any

import torch

from minillm.bench.meter import seconds_of
from minillm.bench.table import NoOptions, shape, shown, word
from minillm.cache import BlockManager, BlockTable, check, pool_stats
from minillm.cache.swap import HostMoves
from minillm.checks import integer
from minillm.config import BLOCK_SIZES
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.model.shapes import SHAPES
from minillm.params import MAX_TOKENS, BeamSearchParams
from minillm.runner.runner import Runner
from minillm.runner.step import ChunkWork, StepWork

LONGEST = 2048
_BATCH = 48
_STEPS = 1500
_BLOCK_SIZE = 16  # of the replays that share


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of prompt and output lengths, by their means."""

    name: str
    prompt_mean: float
    output_mean: float
    sigma: float

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """(prompt tokens, output tokens), each at least 1, together at most `LONGEST`."""
        prompt, output = (
            max(1, round(rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)))
            for mean in (self.prompt_mean, self.output_mean)
        )
        prompt = min(prompt, LONGEST - 1)
        return prompt, min(output, LONGEST - prompt)


ALPACA = Lengths("Alpaca-like", 19.31, 58.45, 0.8)
SHAREGPT = Lengths("ShareGPT-like", 161.31, 337.99, 1.1)


@dataclass(frozen=True)
class MemoryResult:
    """One line: ``value`` is a fraction, of slots wasted or of blocks saved."""

    table: str = shown("", width=18)
    lengths: str = shown("lengths", width=14)
    setting: str = shown("setting", width=36)
    value: float = shown("", ".1%")


@dataclass(frozen=True)
class SwapResult:
    """Milliseconds for a sequence of ``num_tokens`` tokens; its blocks are scattered over the pool."""

    block_size: int = shown("block size", "d")
    num_tokens: int = shown("tokens", "d")
    swap_out: float = shown("swap out ms", ".2f")
    swap_in: float = shown("swap in ms", ".2f")
    recompute: float = shown("recompute ms", ".1f")


@dataclass(frozen=True)
class Options(NoOptions):
    shape: str = shape("smollm2-135m", "shape of the model that is swapped")
    model: str | None = word(None, "let this model choose the beams, instead of a simulation, too")
    num_tokens: int = integer(512, 1, MAX_TOKENS, help="length of the swapped sequence")
    device: str = word("auto", "where it is swapped from: cpu, cuda", metavar="DEVICE")


def measure(options: Options) -> dict[str, Iterator[Any]]:
    """The replays on the books, and what swapping costs on the device.

    Raises:
        UsageError: the shape has no so long context.
    """
    longest = SHAPES[options.shape].max_position_embeddings
    if options.num_tokens > longest:
        raise UsageError(f"num_tokens must be at most {longest}, not {options.num_tokens}: {options.shape} has no more")
    return {"books": _books(options), "swap": _swaps(options)}


def _books(options: Options) -> Iterator[MemoryResult]:
    both, counts = (ALPACA, SHAREGPT), (2, 4, 6)
    for lengths in both:
        for block_size in BLOCK_SIZES:
            yield MemoryResult("waste", lengths.name, f"block size {block_size}", paged_waste(lengths, block_size))
        for name, reserve in RESERVATIONS.items():
            yield MemoryResult("waste", lengths.name, f"contiguous, {name}", contiguous_waste(lengths, reserve))
    for lengths in both:
        for n in counts:
            yield MemoryResult("saved by sharing", lengths.name, f"{n} samples", saved(samples(lengths, n)))
        for width in counts:
            yield MemoryResult("saved by sharing", lengths.name, f"{width} beams", saved(beams(lengths, width)))
    for prefix in (1024, 2048, 4096):
        value = saved(shared_prefix(SHAREGPT, prefix, 32))
        yield MemoryResult("saved by sharing", SHAREGPT.name, f"shared prefix of {prefix}, batch 32", value)
    if options.model is not None:
        chooser = LLM(options.model, device=options.device)
        for lengths, width in product(both, counts):
            value = saved(_model_beams(chooser, lengths, width))
            yield MemoryResult("saved by sharing", lengths.name, f"{width} beams of {options.model}", value)


def _swaps(options: Options) -> Iterator[SwapResult]:
    """Swap against recompute (one prefill at block size 16): taking a sequence off the device, and having it back."""
    llm = LLM(options.shape, load_format="dummy", num_blocks=8, preemption="recompute", device=options.device)
    model, num_tokens = llm.engine.runner.model, options.num_tokens
    tokens = torch.randint(0, model.config.vocab_size, (num_tokens,)).tolist()
    blocks = list(range(-(-num_tokens // _BLOCK_SIZE)))
    work = StepWork(HostMoves(), [], None, [ChunkWork(tokens, 0, blocks, num_tokens, True)], 0)
    runner = Runner(model, len(blocks), _BLOCK_SIZE)

    def milliseconds(run: Callable[..., object], *arguments: object, repeats: int = 5) -> float:
        return 1e3 * seconds_of(partial(run, *arguments), model.device, repeats)

    recompute = milliseconds(runner.compute, work, repeats=3)
    for block_size in BLOCK_SIZES:
        num_blocks = -(-num_tokens // block_size)
        pool = Runner(model, 4 * num_blocks, block_size, num_host_blocks=num_blocks).host_pool
        where = torch.randperm(4 * num_blocks)[:num_blocks].tolist()
        out = [(block, host) for host, block in enumerate(where)]
        back = [(host, block) for block, host in out]
        swap_out = milliseconds(pool.save, out)  # whose first call, which does not count, allocates the host's pool
        yield SwapResult(block_size, num_tokens, swap_out, milliseconds(pool.restore, back), recompute)


def paged_waste(lengths: Lengths, block_size: int) -> float:
    """Slots of allocated blocks that hold no token, as a part of all of them, over a run."""
    rng = random.Random(1)
    manager = BlockManager(_BATCH * -(-LONGEST // block_size), block_size)
    running: list[tuple[BlockTable, int]] = []
    ids = 0
    filled = allocated = 0
    for _ in range(_STEPS):
        while len(running) < _BATCH:
            prompt, output = lengths.draw(rng)
            table = manager.allocate(ids)
            # The first ones are met in mid-life, so that they do not all begin at once.
            manager.append(table, prompt + (rng.randrange(output) if ids < _BATCH else 0))
            running.append((table, prompt + output))
            ids += 1
        for table, _ in running:
            manager.append(table, 1)
        filled += sum(table.num_tokens for table, _ in running)
        allocated += sum(len(table.blocks) for table, _ in running) * block_size
        for table, end in running:
            if table.num_tokens >= end:
                manager.free(table)
        running = [(table, end) for table, end in running if table.num_tokens]
    check(manager)
    return 1 - filled / allocated


RESERVATIONS: dict[str, Callable[[int, int], int]] = {
    "the maximum": lambda prompt, output: LONGEST,
    "the next power of two": lambda prompt, output: prompt + (1 << (output - 1).bit_length()),
    "the exact length": lambda prompt, output: prompt + output,
}


def contiguous_waste(lengths: Lengths, reserve: Callable[[int, int], int]) -> float:
    """The same, for memory reserved when a request begins; room lost between reservations comes on top."""
    rng = random.Random(1)
    filled = reserved = 0
    for _ in range(20_000):
        prompt, output = lengths.draw(rng)
        # Over its life a sequence holds prompt + 1 … prompt + output tokens, a step each.
        filled += output * prompt + output * (output + 1) // 2
        reserved += output * min(LONGEST, reserve(prompt, output))
    return 1 - filled / reserved


def saved(replay: Iterable[BlockManager]) -> float:
    """Blocks that are saved by sharing, as a part of those that the sequences would take apart, over a replay."""
    used = logical = 0
    for manager in replay:
        stats = pool_stats(manager)
        used, logical = used + stats.used_blocks, logical + stats.logical_blocks
    return 1 - used / logical


def samples(lengths: Lengths, n: int) -> Iterator[BlockManager]:
    """``n`` samples of a prompt, again and again."""
    rng = random.Random(2)
    for _ in range(150):
        prompt, output = lengths.draw(rng)
        manager = BlockManager(n * (-(-LONGEST // _BLOCK_SIZE) + 1), _BLOCK_SIZE)
        first = manager.allocate(0)
        manager.append(first, prompt)
        tables = [first, *(manager.fork(first, i) for i in range(1, n))]
        for step in range(output):
            for table in tables:
                manager.append(table, 1)
            manager.take_copies()
            if step % 8 == 0:
                yield manager


def beams(lengths: Lengths, width: int) -> Iterator[BlockManager]:
    """Beam searches, one after the other, whose continuations are simulated."""
    rng = random.Random(3)
    ranks = [-1.5 * math.log(rank) for rank in range(1, 2 * width + 1)]
    for _ in range(60):
        prompt, output = lengths.draw(rng)
        manager = BlockManager(2 * width * (-(-LONGEST // _BLOCK_SIZE) + 1), _BLOCK_SIZE)
        first = manager.allocate(0)
        manager.append(first, prompt)
        beams = [(0.0, first)]
        ids = count(1)
        for step in range(output):
            found = []
            for score, table in beams:
                tokens = [value - 0.5 * math.log(-math.log(rng.random())) for value in ranks]
                total = math.log(sum(map(math.exp, tokens)))
                found += [(score + value - total, table) for value in tokens]
            chosen: dict[int, tuple[float, BlockTable]] = {}
            for score, parent in sorted(found, key=lambda entry: -entry[0])[:width]:
                table = manager.fork(parent, next(ids)) if parent.seq_id in chosen else parent
                chosen[table.seq_id] = score, table
            for _, table in beams:
                if table.seq_id not in chosen:
                    manager.free(table)
            beams = list(chosen.values())
            for _, table in beams:
                manager.append(table, 1)
            manager.take_copies()
            if step % 8 == 0:
                yield manager


INSTRUCTIONS = (
    "Give three tips for staying healthy. Describe the structure of an atom. How can we reduce air pollution? "
    "Explain why the moon has phases to a child of six. Write a short story about a fisherman who finds an old "
    "map in a bottle. List five books that everybody should have read, and say why in one sentence each. "
    "Translate the following sentence into French: the train leaves at noon. Summarise what causes the seasons. "
    "Suggest a dinner for a cold evening. Compare the advantages of living in a city with those of living in the "
    "country. Write an e-mail that asks for a day off. What is the difference between weather and climate? "
    "Rewrite this sentence in the passive voice: the cat chased the mouse. "
)


def _model_beams(llm: LLM, lengths: Lengths, width: int) -> Iterator[BlockManager]:
    """`beams` where a model chooses: real beam searches, one at a time, over real text."""
    engine, rng = llm.engine, random.Random(3)
    text = llm.tokenizer.encode(INSTRUCTIONS)
    for number in range(24):
        prompt, output = lengths.draw(rng)
        start = rng.randrange(len(text))
        tokens = [text[(start + i) % len(text)] for i in range(prompt)]
        params = BeamSearchParams(beam_width=width, max_tokens=output, ignore_eos=True)
        engine.add_request(f"beams-{number}", tokens, params)
        steps = count()
        while engine.has_work:
            engine.step()
            if next(steps) % 8 == 0:
                yield engine.cache
        engine.take_finished()


def shared_prefix(lengths: Lengths, prefix: int, batch: int) -> Iterator[BlockManager]:
    """A batch of requests that find their common prefix in the cache."""
    rng = random.Random(4)
    manager = BlockManager((batch + 1) * -(-(LONGEST + prefix) // _BLOCK_SIZE), _BLOCK_SIZE, prefix_caching=True)
    shared = [rng.randrange(1 << 16) for _ in range(prefix)]
    for number in range(batch):
        prompt, output = lengths.draw(rng)
        tokens = shared + [rng.randrange(1 << 16) for _ in range(prompt + output)]
        table = manager.allocate(number, tokens)
        manager.append(table, len(tokens) - table.num_tokens)
        manager.commit(table, tokens, len(tokens))
    yield manager
