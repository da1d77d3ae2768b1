"""Measure the CPU time of engine steps in which every answer follows a JSON schema.

A stand-in replaces the device: no forward pass is computed.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from minillm.cache import BlockManager
from minillm.engine.admission import Admission
from minillm.engine.engine import Engine
from minillm.engine.preemption import Preemption
from minillm.engine.requests import Requests
from minillm.engine.samples import Samples
from minillm.engine.scheduler import Scheduler
from minillm.errors import UsageError
from minillm.grammar.compiler import Compiler
from minillm.grammar.grammar import Grammar
from minillm.grammar.vocabulary import Vocabulary
from minillm.kernels import AttentionShape, Costs, Field
from minillm.loading.engine import methods_for
from minillm.params import SamplingParams
from minillm.runner.device.rows import Rows, Sharing
from minillm.runner.masks import Masks, masks_of
from minillm.sequence import Chunk, Schedule, Stage
from minillm.text.tokenizer import Tokenizer

_NAME = {"type": "string", "minLength": 20, "maxLength": 60}
_ITEM = {
    "type": "object",
    "properties": {"name": _NAME, "price": {"type": "number"}, "kind": {"enum": ["tool", "toy", "book"]}},
    "required": ["name", "price", "kind"],
    "additionalProperties": False,
}
_SCHEMA = {
    "type": "object",
    "properties": {"title": _NAME, "items": {"type": "array", "items": _ITEM, "minItems": 6, "maxItems": 12}},
    "required": ["title", "items"],
    "additionalProperties": False,
}
_WARM_UP, _STEPS = 60, 150  # in the first steps, the grammars' lexers build their states


class _RandomSampler:
    """Simulate sampling on a GPU: pick a random token for each sequence, among the tokens that its mask allows.

    The time for picking tokens is not measured.
    """

    may_run_ahead, may_compute_ahead = False, True

    def __init__(self, masks: Masks, rng: np.random.Generator) -> None:
        self._masks, self._rng = masks, rng

    def wait(self) -> tuple[list[int], list[None], list[bool]]:
        bits = np.unpackbits(self._masks.words.numpy().view(np.uint8), axis=1, bitorder="little")
        tokens = [int(self._rng.choice(np.flatnonzero(each))) for each in bits]
        return tokens, [None] * len(tokens), [False] * len(tokens)


class _Device:
    """Simulate a runner on a GPU: do the runner's bookkeeping of device state, and compute nothing."""

    def __init__(self, num_seqs: int, vocab: int) -> None:
        self._vocab = vocab
        self._rng, self._decodes = np.random.default_rng(0), list[Chunk]()
        sharing = Sharing(AttentionShape(32, 8, 128, 2, 132), Costs())
        self._rows = Rows(num_seqs, Field.TABLE + 256, 16, sharing)
        self.forward = SimpleNamespace(take=lambda: None)  # no prompt is scored

    def run(self, schedule: Schedule, copies: object) -> tuple[None, list[Chunk]]:
        sampled = [chunk for chunk in schedule.chunks if chunk.num_logits]
        for row, chunk in enumerate(sampled):
            chunk.row = row
        self._decodes = schedule.decodes
        if schedule.decodes:
            self._rows.work_for(schedule.decodes, joins=bool(schedule.prefills))
        return None, sampled

    def draw(self, logits: None, draws: list[Chunk]) -> _RandomSampler:
        masks = masks_of([(draw.group, draw.sequence) for draw in draws], self._vocab, torch.device("cpu"))
        self._rows.rows_for(draws, self._decodes)
        self._rows.take_changes()
        self._rows.note_drawn(draws)
        return _RandomSampler(masks, self._rng)

    def move(self, schedule: Schedule) -> None:
        """Do nothing: no blocks have to be moved."""


_WAIT = "waiting for the device"
# The timed methods: class, name, and the part of a step that the time counts for.
_METHODS: tuple[tuple[type, str, str], ...] = (
    (Engine, "step", "the engine itself"),
    (Scheduler, "schedule", "scheduler and cache"),
    (Engine, "note_computed", "scheduler and cache"),
    (Requests, "advance", "matchers take tokens"),
    (Samples, "append", "texts and ends"),
    (Vocabulary, "fill", "masks: the library"),
    (_Device, "run", "launching forward passes"),
    (_Device, "draw", "launching draws"),
    (_RandomSampler, "wait", _WAIT),
)


@contextmanager
def _parts_of_steps() -> Iterator[dict[str, float]]:
    """Time all engine steps of this process inside the ``with``, by wrapping the methods in `_METHODS`.

    Yield a dictionary: name of a part -> seconds so far. Clear the dictionary to restart the measurement. If one part
    calls another part, the time of that call counts only for the called part.
    """
    seconds: dict[str, float] = defaultdict(float)
    within: list[float] = []  # for each timed call that is running, outermost first: the seconds of timed calls in it

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            within.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - began
                seconds[part] += taken - within.pop()
                if within:
                    within[-1] += taken

        return call

    untimed = [(owner, name, getattr(owner, name)) for owner, name, _ in _METHODS]
    for owner, name, part in _METHODS:
        setattr(owner, name, timed(part, getattr(owner, name)))
    try:
        yield seconds
    finally:
        for owner, name, function in untimed:
            setattr(owner, name, function)


def grammar_steps(num_seqs: int, vocab: int, tokenizer: Tokenizer | None = None) -> dict[str, float]:
    """Return the CPU time of each part of a step in seconds (medians), by the part's name.

    In each step, ``num_seqs`` sequences decode and follow `_SCHEMA`. The wait for the device is left out. Without a
    tokenizer, a vocabulary of ``vocab`` random texts is used.
    """
    scheduler = Scheduler(Admission(Preemption(BlockManager(num_seqs * 80, 16, prefix_caching=True))), num_seqs, 8192)
    requests = Requests(scheduler, tokenizer, vocab, 4096, frozenset([2]))
    if tokenizer is None:
        requests.grammars.compiler = Compiler(_random_vocabulary(vocab, [2]))
    device = _Device(num_seqs, vocab)
    engine = Engine(cast(Any, device), requests, methods_for(requests, cast(Any, device)))
    rng, grammar, numbers = random.Random(0), Grammar.json(_SCHEMA), itertools.count()
    steps: list[dict[str, float]] = []
    with _parts_of_steps() as seconds:
        while len(steps) < _STEPS:
            for number in itertools.islice(numbers, num_seqs - len(requests.groups)):
                prompt = [rng.randrange(3, vocab) for _ in range(100)]
                engine.add_request(str(number), prompt, SamplingParams(seed=number, max_tokens=300, grammar=grammar))
            all_decode = not scheduler.waiting and all(group.stage is Stage.SPLIT for group in scheduler.running)
            seconds.clear()
            engine.step()
            engine.take_finished()
            if all_decode and engine.figures.num_steps > _WARM_UP:
                steps.append(dict(seconds))
    parts = dict.fromkeys(part for _, _, part in _METHODS if part != _WAIT)
    return {part: statistics.median(each.get(part, 0.0) for each in steps) for part in parts}


def _random_vocabulary(size: int, end_ids: Collection[int] = ()) -> Vocabulary:
    """Return a vocabulary of ``size`` tokens with random texts.

    Every printable ASCII character is a token. Most other tokens are words of 2 to 8 random letters, and a few are
    random punctuation. Half of these other tokens begin with a space. Tokens in ``end_ids`` have no text.
    """
    rng = random.Random(0)
    letters, signs = "abcdefghijklmnopqrstuvwxyz", ' ,.:;"{}[]()0123456789'
    words = dict.fromkeys(chr(code) for code in range(32, 127))
    while len(words) < size:
        word = "".join(rng.choices(letters if rng.random() < 0.95 else signs, k=rng.randint(2, 8)))
        words[rng.choice(("", " ")) + word] = None
    texts = iter(words)
    tokens = [b"" if token_id in end_ids else next(texts).encode() for token_id in range(size)]

    def encode(text: str) -> list[int]:
        raise UsageError("only the longest tokens")  # `Vocabulary.encode` falls back to the longest tokens that match

    return Vocabulary(tokens, encode)
