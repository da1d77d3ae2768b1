"""``io``: measure offline throughput for several lengths of prompts and answers.

For each length of a prompt, the time to its first token is measured as well. The workload calls `LLM.generate`, as an
offline program does. The prefix cache is emptied before each run.
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from minillm.bench.table import ModelOptions, Subject, shown
from minillm.checks import custom
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.params import SamplingParams

Case = tuple[int, int, int]  # tokens of a prompt, tokens of an answer, requests
_CASES = "128:128:1024,1000:1000:256,2048:128:192,5000:500:48,20000:500:12"
_WARM_UP = 64, 16  # before a measured run: at most this many requests, with answers of this many tokens
_RUNS = 3  # timed runs for the first token, after a run that warms up


def _cases(name: str, value: Any) -> tuple[Case, ...]:
    """Parse cases such as ``128:128:1024,2048:128:192``. Raises UsageError if the text has another format."""
    try:
        cases = [tuple(int(number) for number in case.split(":")) for case in str(value).split(",")]
    except ValueError:
        cases = []
    if not cases or any(len(case) != 3 or min(case) < 1 for case in cases):
        raise UsageError(f"{name} takes IN:OUT:REQUESTS, separated by commas, such as 128:128:1024, not {value!r}")
    return tuple((first, second, third) for first, second, third in cases)


@dataclass(frozen=True)
class IoOptions(ModelOptions):
    cases: Any = custom(  # noqa: RUF009
        None,
        _cases,
        metavar="IN:OUT:REQUESTS,…",
        help=f"tokens of each prompt and answer, and number of requests (default: {_CASES})",
    )


@dataclass(frozen=True)
class IoResult:
    """The result of one case.

    ``rate``: generated tokens per second of the whole run, including the prompts' computation.
    """

    input_len: int = shown("prompt", ",")
    output_len: int = shown("answer", ",")
    num_requests: int = shown("requests", ",")
    first_token: float = shown("first ms, alone", ",.1f", 1e3)
    seconds: float = shown("seconds", ".2f")
    rate: float = shown("tok/s", ",.0f")


def measure(subject: Subject, options: IoOptions) -> Iterator[IoResult]:
    """Measure each case twice: the time to the first token of a single prompt, then all requests at once.

    Before all requests are measured, a smaller run with prompts of the same length warms up.
    """
    llm, rng = subject.llm, random.Random(0)
    vocab = llm.engine.runner.model.config.vocab_size
    for input_len, output_len, count in options.cases or _cases("cases", _CASES):

        def run(requests: int, tokens: int, length: int = input_len) -> float:
            return _seconds(llm, [[rng.randrange(vocab) for _ in range(length)] for _ in range(requests)], tokens)

        first = statistics.median([run(1, 1) for _ in range(_RUNS + 1)][1:])
        run(min(count, _WARM_UP[0]), min(output_len, _WARM_UP[1]))
        seconds = run(count, output_len)
        yield IoResult(input_len, output_len, count, first, seconds, count * output_len / seconds)


def _seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Return the time to answer all prompts with ``num_tokens`` tokens each."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began
