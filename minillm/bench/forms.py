"""``forms``: measure how much a JSON schema slows down generation.

Answers that follow a schema are compared with unconstrained answers of the same lengths, in alternating runs.

A model with random weights has no tokenizer, so each of its tokens stands for a random text. Its answers are as random
as the schema allows. The work is the same as for other models.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minillm.bench.parts import PARTS, parts_of_steps
from minillm.bench.table import ModelOptions, Subject, shown
from minillm.bench.workloads import Request, drive
from minillm.checks import check_integer, custom, integer
from minillm.errors import UsageError
from minillm.grammar.compiler import Compiler
from minillm.grammar.grammar import Grammar
from minillm.grammar.vocabulary import Vocabulary
from minillm.llm import LLM
from minillm.params import MAX_TOKENS, SamplingParams

_NAME = {"type": "string", "minLength": 20, "maxLength": 60}
_ITEM = {
    "type": "object",
    "properties": {"name": _NAME, "price": {"type": "number"}, "kind": {"enum": ["tool", "toy", "book"]}},
    "required": ["name", "price", "kind"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"title": _NAME, "items": {"type": "array", "items": _ITEM, "minItems": 6, "maxItems": 12}},
    "required": ["title", "items"],
    "additionalProperties": False,
}


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    return tuple(check_integer(name, size, 1, MAX_TOKENS) for size in sizes)


@dataclass(frozen=True)
class Options(ModelOptions):
    batch_size: Sequence[int] = custom(
        (16,), _sizes, metavar="N", parse=int, repeats=True, help="requests at a time; repeatable"
    )
    output_len: int = integer(200, 2, MAX_TOKENS, help="longest answer in tokens")
    runs: int = integer(5, 1, 100, help="pairs of runs; the result is their median")


@dataclass(frozen=True)
class HostPart:
    """The mean CPU time of one part of a step, such as the scheduler, in each kind of run. Times are in seconds.

    The runs that `FormsResult` reports are not timed by part. So each kind of run is repeated to get these times.
    """

    part: str = shown("CPU time per step, ms", width=32)
    free: float = shown("free", ".3f", 1e3)
    one_formed: float = shown("with one", ".3f", 1e3)
    formed: float = shown("schema", ".3f", 1e3)


@dataclass(frozen=True)
class FormsResult:
    """The result for one batch size: medians over the runs.

    "Free" runs are unconstrained. In runs with one schema, one request follows the schema, and all other requests are
    unconstrained.
    """

    batch_size: int = shown("requests at a time", ",")
    num_tokens: int = shown("tokens", ",")
    free: float = shown("tokens per second, free", ",.0f")
    formed: float = shown("with a schema", ",.0f")
    one_formed: float = shown("free, batched with one schema", ",.0f")
    lost: float = shown("lost with a schema", ".1%")
    lost_by_one: float = shown("lost with one", ".1%")
    host: list[HostPart] = field(default_factory=list)


def measure(subject: Subject, options: Options) -> dict[str, FormsResult]:
    """Measure answers with a schema, and unconstrained answers with as many tokens, for each batch size.

    Raises UsageError if the engine reports an error for a request.
    """
    llm = subject.llm
    requests, vocab = llm.engine.requests, llm.engine.runner.model.config.vocab_size
    if llm.engine.tokenizer is None:
        requests.grammars.compiler = Compiler(random_vocabulary(vocab, requests.eos_token_ids))
    return {f"{size} requests": _measure(llm, size, options) for size in options.batch_size}


def _measure(llm: LLM, batch_size: int, options: Options) -> FormsResult:
    rng, vocab = random.Random(0), llm.engine.runner.model.config.vocab_size
    grammar = Grammar.json(SCHEMA)
    formed: list[Request] = [
        (
            [rng.randrange(vocab) for _ in range(100)],
            SamplingParams(seed=number, max_tokens=options.output_len, grammar=grammar),
        )
        for number in range(batch_size)
    ]
    seconds: tuple[list[float], ...] = ([], [], [])
    counts: list[int] = []
    kinds: list[list[Request]] = []
    for run in range(options.runs + 1):
        llm.reset_prefix_cache()
        taken, outputs = drive(llm.engine, formed)
        if failed := next((output.error for output in outputs if output.error), None):
            raise UsageError(f"an answer failed: {failed}")
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        free: list[Request] = [
            (prompt, replace(params, grammar=None, max_tokens=count, ignore_eos=True))
            for (prompt, params), count in zip(formed, counts, strict=True)
        ]
        kinds = [free, [formed[0], *free[1:]], formed]
        times = []
        for each in kinds[:2]:
            llm.reset_prefix_cache()
            times.append(drive(llm.engine, each)[0])
        for into, value in zip(seconds, [*times, taken], strict=True):
            into += [value] if run else []  # the first run warms up
    plain, mixed, by_schema = map(statistics.median, seconds)
    tokens = sum(counts)
    rates = tokens / plain, tokens / by_schema, tokens / mixed
    host = _host_parts(llm, kinds)
    return FormsResult(batch_size, tokens, *rates, 1 - plain / by_schema, 1 - plain / mixed, host)


def _host_parts(llm: LLM, kinds: list[list[Request]]) -> list[HostPart]:
    """Run each list of requests once. Return the mean CPU time per step, split into `PARTS`."""
    found: list[dict[str, float]] = []
    with parts_of_steps(type(llm.engine.runner)) as seconds:
        for requests in kinds:
            llm.reset_prefix_cache()
            seconds.clear()
            first = llm.engine.figures.num_steps
            drive(llm.engine, requests)
            count = llm.engine.figures.num_steps - first
            found.append({part: seconds.get(part, 0.0) / count for part in PARTS})
    return [HostPart(part, *(each[part] for each in found)) for part in PARTS]


def random_vocabulary(size: int, end_ids: Collection[int] = ()) -> Vocabulary:
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
