"""``memory``: measure the memory that paging and sharing save, by simulating requests on the block manager alone."""

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
from minillm.cache import BlockManager, BlockTable, pool_stats
from minillm.cache.swap import HostMoves
from minillm.checks import choice, integer
from minillm.config import BLOCK_SIZES
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.model.shapes import SHAPES
from minillm.params import MAX_TOKENS, BeamSearchParams
from minillm.runner.runner import Runner
from minillm.runner.step import ChunkWork, StepWork

LONGEST = 2048
_BATCH, _STEPS = 48, 1500
_BLOCK_SIZE = 16  # tokens per block in replays with sharing


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of prompt and output lengths, defined by their means in tokens.

    The means are from Kwon et al. 2023, figure 11. The paper gives no variance, so sigma is an assumption.
    """

    name: str
    prompt_mean: float
    output_mean: float
    sigma: float

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return random (prompt tokens, output tokens). Each is at least 1, their sum at most `LONGEST`."""
        places = [math.log(mean) - self.sigma**2 / 2 for mean in (self.prompt_mean, self.output_mean)]
        prompt, output = (max(1, round(rng.lognormvariate(place, self.sigma))) for place in places)
        prompt = min(prompt, LONGEST - 1)
        return prompt, min(output, LONGEST - prompt)


ALPACA = Lengths("Alpaca-like", 19.31, 58.45, 0.8)
SHAREGPT = Lengths("ShareGPT-like", 161.31, 337.99, 1.1)


@dataclass(frozen=True)
class MemoryResult:
    """The result of one simulation: a fraction.

    ``value`` is the fraction of token slots that are wasted ("waste"), or the fraction of blocks that sharing saves
    ("saved by sharing").
    """

    table: str = shown("", width=18)
    lengths: str = shown("lengths", width=14)
    setting: str = shown("setting", width=36)
    value: float = shown("", ".1%")


@dataclass(frozen=True)
class SwapResult:
    """The times to swap a sequence of ``num_tokens`` tokens out and in, and to recompute it, in milliseconds.

    The sequence's blocks are scattered over the pool.
    """

    block_size: int = shown("block size", "d")
    num_tokens: int = shown("tokens", "d")
    swap_out: float = shown("swap out ms", ".2f")
    swap_in: float = shown("swap in ms", ".2f")
    recompute: float = shown("recompute ms", ".1f")


@dataclass(frozen=True)
class Options(NoOptions):
    shape: str = shape("smollm2-135m", "dimensions of the swapped model")
    model: str | None = word(None, "also choose beams with this model, instead of a simulation")
    num_tokens: int = integer(512, 1, MAX_TOKENS, help="length of the swapped sequence")
    kv_cache_dtype: str = choice("auto", ("auto", "int8"), help="data type of the swapped K and V")
    device: str = word("auto", "device of the swapped sequence: cpu or cuda", metavar="DEVICE")


def measure(options: Options) -> dict[str, Iterator[Any]]:
    """Simulate requests on the block manager, and measure swapping a sequence on the device.

    Raises UsageError if `Options.num_tokens` exceeds the model's context.
    """
    longest = SHAPES[options.shape].max_position_embeddings
    if options.num_tokens > longest:
        raise UsageError(f"num_tokens must be at most {longest}, not {options.num_tokens}: {options.shape} has no more")
    return {"books": _replays(options), "swap": _swaps(options)}


def _replays(options: Options) -> Iterator[MemoryResult]:
    both, counts = (ALPACA, SHAREGPT), (2, 4, 6)
    replays: list[tuple[Lengths, str, Iterator[BlockManager]]] = []
    for lengths in both:
        replays += [(lengths, f"{n} samples", samples(lengths, n)) for n in counts]
        replays += [(lengths, f"{width} beams", beams(lengths, width)) for width in counts]
        for block_size in BLOCK_SIZES:
            yield MemoryResult("waste", lengths.name, f"block size {block_size}", paged_waste(lengths, block_size))
        for name, reserve in RESERVATIONS.items():
            yield MemoryResult("waste", lengths.name, f"contiguous, {name}", contiguous_waste(lengths, reserve))
    for prefix in (1024, 2048, 4096):
        replays.append((SHAREGPT, f"shared prefix of {prefix}, batch 32", shared_prefix(SHAREGPT, prefix, 32)))
    if options.model is not None:
        llm = LLM(options.model, device=options.device)
        for lengths, width in product(both, counts):
            replays.append((lengths, f"{width} beams of {options.model}", _model_beams(llm, lengths, width)))
    for lengths, setting, replay in replays:
        yield MemoryResult("saved by sharing", lengths.name, setting, saved(replay))


def _swaps(options: Options) -> Iterator[SwapResult]:
    """For each block size, measure the time to swap a sequence out and in.

    Compare it with one prefill of the sequence.
    """
    llm = LLM(
        options.shape, load_format="dummy", num_blocks=8, preemption="recompute", device=options.device,
        kv_cache_dtype=options.kv_cache_dtype,
    )  # fmt: skip
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
        back = list(enumerate(torch.randperm(4 * num_blocks)[:num_blocks].tolist()))
        # The first call is not timed. It allocates the pool in CPU memory.
        swap_out = milliseconds(pool.save, [(block, host) for host, block in back])
        yield SwapResult(block_size, num_tokens, swap_out, milliseconds(pool.restore, back), recompute)


def paged_waste(lengths: Lengths, block_size: int) -> float:
    """Return the fraction of allocated token slots that are empty, for a batch of sequences with paged memory.

    Finished sequences are replaced by new ones. The result is the average over all steps.
    """
    rng = random.Random(1)
    manager = BlockManager(_BATCH * -(-LONGEST // block_size), block_size)
    running: list[tuple[BlockTable, int]] = []
    ids = count()
    filled = allocated = 0
    for _ in range(_STEPS):
        while len(running) < _BATCH:
            prompt, output = lengths.draw(rng)
            table = manager.allocate(next(ids))
            # The first sequences are partly finished, so that they do not all begin at once.
            manager.append(table, prompt + (rng.randrange(output) if table.seq_id < _BATCH else 0))
            running.append((table, prompt + output))
        for table, _ in running:
            manager.append(table, 1)
        filled += sum(table.num_tokens for table, _ in running)
        allocated += sum(len(table.blocks) for table, _ in running) * block_size
        for table, end in running:
            if table.num_tokens >= end:
                manager.free(table)
        running = [(table, end) for table, end in running if table.num_tokens]
    return 1 - filled / allocated


RESERVATIONS: dict[str, Callable[[int, int], int]] = {
    "the maximum": lambda prompt, output: LONGEST,
    "the next power of two": lambda prompt, output: prompt + (1 << (output - 1).bit_length()),
    "the exact length": lambda prompt, output: prompt + output,
}


def contiguous_waste(lengths: Lengths, reserve: Callable[[int, int], int]) -> float:
    """Return the fraction of reserved token slots that are empty, if requests reserve contiguous memory at their start.

    ``reserve(prompt, output)`` returns the number of tokens to reserve for a prompt of ``prompt`` and an output of
    ``output`` tokens. Fragmentation between reservations is not counted.
    """
    rng = random.Random(1)
    filled = reserved = 0
    for _ in range(20_000):
        prompt, output = lengths.draw(rng)
        # In successive steps, a sequence has prompt + 1, prompt + 2, … prompt + output tokens.
        filled += output * prompt + output * (output + 1) // 2
        reserved += output * min(LONGEST, reserve(prompt, output))
    return 1 - filled / reserved


def saved(replay: Iterable[BlockManager]) -> float:
    """Return the fraction of blocks that sharing saves, compared with sequences that share nothing.

    The result is the average over the block managers that ``replay`` yields.
    """
    counts = [(stats.used_blocks, stats.logical_blocks) for stats in map(pool_stats, replay)]
    used, logical = map(sum, zip(*counts, strict=True))
    return 1 - used / logical


def samples(lengths: Lengths, n: int) -> Iterator[BlockManager]:
    """Simulate requests on the block manager alone, one after another.

    Each request forks its prompt into ``n`` samples.

    Yield the block manager every eight steps.
    """
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
    """Simulate beam searches on the block manager alone, one after another. Yield the block manager every eight steps.

    The log-probabilities of each beam's next tokens are simulated: a Zipf distribution with exponent 1.5, with Gumbel
    noise of scale 0.5.
    """
    rng = random.Random(3)
    ranks = [-1.5 * math.log(rank) for rank in range(1, 2 * width + 1)]
    for _ in range(60):
        prompt, output = lengths.draw(rng)
        manager = BlockManager(2 * width * (-(-LONGEST // _BLOCK_SIZE) + 1), _BLOCK_SIZE)
        first = manager.allocate(0)
        manager.append(first, prompt)
        beams, ids = [(0.0, first)], count(1)
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
    """Run beam searches with a model, one after another. Yield the block manager every eight steps.

    The prompts are excerpts of a real text. In contrast, `beams` simulates the log-probabilities without a model.
    """
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
    """Simulate a batch of requests on the block manager alone. The requests share a cached prefix of ``prefix`` tokens.

    Yield the block manager once, when all requests have their full length.
    """
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
