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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from minillm.bench.registry import NoOptions, shape, word
from minillm.bench.swap import SwapResult, measure_swaps
from minillm.bench.table import shown
from minillm.cache import BlockManager, BlockTable, check, pool_stats
from minillm.checks import integer
from minillm.config import BLOCK_SIZES
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.model.shapes import SHAPES
from minillm.params import MAX_TOKENS, BeamSearchParams

LONGEST = 2048
_BATCH = 48
_STEPS = 1500


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
            round(rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma))
            for mean in (self.prompt_mean, self.output_mean)
        )
        prompt = min(max(1, prompt), LONGEST - 1)
        return prompt, min(max(1, output), LONGEST - prompt)


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


def _swaps(options: Options) -> Iterator[SwapResult]:
    llm = LLM(options.shape, load_format="dummy", num_blocks=8, preemption="recompute", device=options.device)
    yield from measure_swaps(llm.engine.runner.model, options.num_tokens)


def _books(options: Options) -> Iterator[MemoryResult]:
    for lengths in (ALPACA, SHAREGPT):
        for block_size in BLOCK_SIZES:
            yield MemoryResult("waste", lengths.name, f"block size {block_size}", paged_waste(lengths, block_size))
        for name, reserve in RESERVATIONS.items():
            yield MemoryResult("waste", lengths.name, f"contiguous, {name}", contiguous_waste(lengths, reserve))
    for lengths in (ALPACA, SHAREGPT):
        for n in (2, 4, 6):
            yield MemoryResult("saved by sharing", lengths.name, f"{n} samples", sampling_saving(lengths, n))
        for width in (2, 4, 6):
            yield MemoryResult("saved by sharing", lengths.name, f"{width} beams", beam_saving(lengths, width))
    for prefix in (1024, 2048, 4096):
        setting = f"shared prefix of {prefix}, batch 32"
        yield MemoryResult("saved by sharing", SHAREGPT.name, setting, prefix_saving(SHAREGPT, prefix, 32))
    if options.model is not None:
        chooser = LLM(options.model, device=options.device)
        for lengths in (ALPACA, SHAREGPT):
            for width in (2, 4, 6):
                value = model_beam_saving(chooser, lengths, width)
                yield MemoryResult("saved by sharing", lengths.name, f"{width} beams of {options.model}", value)


# --- waste ------------------------------------------------------------------------------------------------------------


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


# --- sharing ----------------------------------------------------------------------------------------------------------


def _saved(manager: BlockManager) -> tuple[int, int]:
    stats = pool_stats(manager)
    return stats.logical_blocks - stats.used_blocks, stats.logical_blocks


def sampling_saving(lengths: Lengths, n: int, block_size: int = 16) -> float:
    """Blocks that ``n`` samples of a prompt save by sharing it, as a part of what they would take apart."""
    rng = random.Random(2)
    saved = logical = 0
    for _ in range(150):
        prompt, output = lengths.draw(rng)
        manager = BlockManager(n * -(-LONGEST // block_size) + n, block_size)
        first = manager.allocate(0)
        manager.append(first, prompt)
        tables = [first, *(manager.fork(first, i) for i in range(1, n))]
        for step in range(output):
            for table in tables:
                manager.append(table, 1)
            manager.take_copies()
            if step % 8 == 0:
                here = _saved(manager)
                saved, logical = saved + here[0], logical + here[1]
    return saved / logical


def beam_saving(lengths: Lengths, width: int, block_size: int = 16) -> float:
    """The same for the beams of a search."""
    rng = random.Random(3)
    ranks = [-1.5 * math.log(rank) for rank in range(1, 2 * width + 1)]
    saved = logical = 0
    for _ in range(60):
        prompt, output = lengths.draw(rng)
        manager = BlockManager(2 * width * (-(-LONGEST // block_size) + 1), block_size)
        first = manager.allocate(0)
        manager.append(first, prompt)
        beams = [(0.0, first)]
        ids = 1
        for step in range(output):
            found = []
            for score, table in beams:
                tokens = [value - 0.5 * math.log(-math.log(rng.random())) for value in ranks]
                total = math.log(sum(map(math.exp, tokens)))
                found += [(score + value - total, table) for value in tokens]
            found.sort(key=lambda entry: -entry[0])
            chosen, taken = [], set()
            for score, parent in found[:width]:
                table = parent
                if parent.seq_id in taken:
                    table = manager.fork(parent, ids)
                    ids += 1
                taken.add(parent.seq_id)
                chosen.append((score, table))
            for _, table in beams:
                if table.seq_id not in taken:
                    manager.free(table)
            beams = chosen
            for _, table in beams:
                manager.append(table, 1)
            manager.take_copies()
            if step % 8 == 0:
                here = _saved(manager)
                saved, logical = saved + here[0], logical + here[1]
    return saved / logical


INSTRUCTIONS = (
    "Give three tips for staying healthy. Describe the structure of an atom. How can we reduce air pollution? "
    "Explain why the moon has phases to a child of six. Write a short story about a fisherman who finds an old "
    "map in a bottle. List five books that everybody should have read, and say why in one sentence each. "
    "Translate the following sentence into French: the train leaves at noon. Summarise what causes the seasons. "
    "Suggest a dinner for a cold evening. Compare the advantages of living in a city with those of living in the "
    "country. Write an e-mail that asks for a day off. What is the difference between weather and climate? "
    "Rewrite this sentence in the passive voice: the cat chased the mouse. "
)


def model_beam_saving(llm: LLM, lengths: Lengths, width: int, requests: int = 24) -> float:
    """`beam_saving` where a model chooses: real beam searches, one at a time, over real text."""
    engine, rng = llm.engine, random.Random(3)
    text = llm.tokenizer.encode(INSTRUCTIONS)
    saved = logical = 0
    for number in range(requests):
        prompt, output = lengths.draw(rng)
        start = rng.randrange(len(text))
        tokens = [text[(start + i) % len(text)] for i in range(prompt)]
        params = BeamSearchParams(beam_width=width, max_tokens=output, ignore_eos=True)
        engine.add_request(f"beams-{number}", tokens, params)
        steps = 0
        while engine.has_work:
            engine.step()
            if steps % 8 == 0:
                here = _saved(engine.cache)
                saved, logical = saved + here[0], logical + here[1]
            steps += 1
        engine.take_finished()
    return saved / logical


def prefix_saving(lengths: Lengths, prefix: int, batch: int, block_size: int = 16) -> float:
    """Blocks that a batch of requests with one prefix saves by finding it in the cache."""
    rng = random.Random(4)
    manager = BlockManager((batch + 1) * -(-(LONGEST + prefix) // block_size), block_size, prefix_caching=True)
    shared = [rng.randrange(1 << 16) for _ in range(prefix)]
    for number in range(batch):
        prompt, output = lengths.draw(rng)
        tokens = shared + [rng.randrange(1 << 16) for _ in range(prompt + output)]
        table = manager.allocate(number, tokens)
        manager.append(table, len(tokens) - table.num_tokens)
        manager.commit(table, tokens, len(tokens))
    saved, logical = _saved(manager)
    return saved / logical
