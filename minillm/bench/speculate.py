"""``speculate``: what speculation by lookup saves, on texts that repeat their prompts and on one that does not.

The texts are in the public domain. Both ways run by turns in one process; times are of the tokens after the first.
"""

import statistics
from dataclasses import dataclass

from minillm.bench.table import ModelOptions, Subject, shown
from minillm.bench.workloads import times_of
from minillm.checks import integer
from minillm.engine.requests import Request
from minillm.engine.samples import Samples
from minillm.engine.speculation import LookupSamples
from minillm.params import MAX_TOKENS, SamplingParams

_ALICE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, and "
    "what is the use of a book, thought Alice, without pictures or conversations? So she was considering in her own "
    "mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making "
    "a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with "
    "pink eyes ran close by her."
)
_SPEECH = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
    "battle-field of that war."
)
_CODE = '''def gcd(a, b):
    """Euclid's algorithm."""
    while b:
        a, b = b, a % b
    return a

def sieve(limit):
    """The primes below limit, as Eratosthenes found them."""
    composite = [False] * limit
    primes = []
    for number in range(2, limit):
        if not composite[number]:
            primes.append(number)
            for multiple in range(number * number, limit, number):
                composite[multiple] = True
    return primes
'''
PROMPTS = {
    "edit": "Correct the spelling of this text, and change nothing else. Write the whole corrected text.\n\n"
    + _ALICE.replace("tired", "tierd").replace("pictures", "picturs"),
    "quote": f"Repeat this speech word for word:\n\n{_SPEECH}",
    "code": "Rename the function gcd to greatest_common_divisor, and write the whole code again:\n\n"
    f"```python\n{_CODE}```",
    "nothing": "Write one word after the other, each a new one.",
}


@dataclass(frozen=True)
class Options(ModelOptions):
    output_len: int = integer(200, 2, MAX_TOKENS, help="longest answer in tokens")
    runs: int = integer(3, 1, 100, help="runs of each, by turns; medians count")


@dataclass(frozen=True)
class SpeculationResult:
    """Medians of seconds per token after the first; guesses of all runs. ``same``: both ways gave the same tokens."""

    name: str = shown("")
    num_tokens: int = shown("tokens", "d")
    plain: float = shown("ms/token", ".1f", 1e3)
    guessing: float = shown("guessing", ".1f", 1e3)
    speed_up: float = shown("speed-up", ".2f")
    tokens_per_step: float = shown("tokens/step", ".2f")
    num_guessed: int = shown("guessed", "d")
    num_right: int = shown("right", "d")
    same: bool = shown("same tokens")


def measure(subject: Subject, options: Options) -> list[SpeculationResult]:
    """Measure each text, plainly and with guesses; UsageError where the model has no tokenizer."""
    return [_measure(subject, name, prompt, options) for name, prompt in PROMPTS.items()]


def _measure(subject: Subject, name: str, prompt: str, options: Options) -> SpeculationResult:
    llm, engine = subject.llm, subject.llm.engine
    # Where nothing is to be found each token is a surprise: it is sampled hot.
    surprising = name == "nothing"
    params = SamplingParams(
        max_tokens=options.output_len, seed=0, temperature=2.0 if surprising else 0.0, ignore_eos=surprising
    )
    guessing = LookupSamples(engine.requests, engine.runner)
    ways: list[Samples] = [Samples(engine.requests, engine.runner), guessing]
    seconds: list[list[float]] = [[], []]
    answers: list[list[int]] = [[], []]
    num_steps = 0
    token_ids = llm.token_ids(prompt)
    for run in range(1 + options.runs):  # the first one warms up
        for number in (0, 1) if run % 2 else (1, 0):
            llm.reset_prefix_cache()
            began = engine.figures.num_steps
            engine.requests.add(Request(token_ids, params, request_id=name), ways[number])
            while engine.has_work:
                engine.step()
            [output] = engine.take_finished()
            answers[number] = output.outputs[0].token_ids
            if run:
                seconds[number].append(times_of(output)[1])
            if number:
                num_steps += engine.figures.num_steps - began - 1
    plain, guessed = map(statistics.median, seconds)
    tokens = len(answers[0])
    return SpeculationResult(
        name,
        tokens,
        plain,
        guessed,
        plain / guessed if guessed else 0.0,
        (1 + options.runs) * (tokens - 1) / max(1, num_steps),
        guessing.num_guessed,
        guessing.num_right,
        answers[0] == answers[1],
    )
