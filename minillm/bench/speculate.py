"""``speculate``: measure speculative decoding on texts that repeat their prompts, in chats, and on random text.

Three methods alternate in one process: without speculation, by n-gram lookup, and with ``--speculate MODEL`` by a draft
model. Times cover the tokens after the first.

Prompts use the model's chat template, if it has one. The long texts are in the public domain. A chat has three turns;
its later prompts contain the answers generated without speculation. Chat answers are sampled. Some repeat themselves
more than others, so each chat runs with several seeds.

A model with random weights does not repeat anything. Its quantized copy (``--shape llama-8b --speculate
llama-8b:q4_0``) is a poor draft model, because the model's top tokens are almost equally likely. But the higher the
temperature, the more a token depends on the noise that both models share. At some temperature, the copy's acceptance
rate therefore equals that of a real draft model. The cost of a draft token does not depend on its value, so each speed
is reported with its acceptance rate.

Finally, if the output head of this model is a separate matrix, it is overwritten so that the model counts: token t + 1
follows token t. The model then repeats a prompt exactly, and a step costs as much as before.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.bench.table import ModelOptions, Subject, shown
from minillm.bench.workloads import times_of
from minillm.checks import integer
from minillm.engine.engine import Engine
from minillm.engine.requests import Request
from minillm.engine.samples import Samples
from minillm.llm import LLM
from minillm.model.llama import Llama
from minillm.outputs import RequestOutput
from minillm.params import MAX_TOKENS, SamplingParams
from minillm.speculation.drafter import drafter_of
from minillm.speculation.method import SpeculativeSamples
from minillm.text.tokenizer import Tokenizer

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
PROMPTS: dict[str, tuple[str, ...]] = {
    "edit": (
        "Correct the spelling of this text, and change nothing else. Write the whole corrected text.\n\n"
        + _ALICE.replace("tired", "tierd").replace("pictures", "picturs"),
    ),
    "quote": (f"Repeat this speech word for word:\n\n{_SPEECH}",),
    "code": (
        f"Rename the function gcd to greatest_common_divisor, and write the whole code again:\n\n```python\n{_CODE}```",
    ),
    "chat": (
        "What is the capital of France, and what is it known for?",
        "Why is the sky blue? Explain it to a child.",
        "Give me three ideas for a dinner without meat.",
        "Write a short letter to a friend who has moved to another city.",
    ),
    "nothing": ("Write one word after the other, each a new one.",),
}
_SEEDS = 3  # seeds per chat
_FOLLOW_UPS = {"second turn": "Tell me more about that.", "third turn": "Sum up what you have told me."}
_TURNS = "chat", *_FOLLOW_UPS
_RANDOM_IDS = tuple(range(1000, 3000, 7))
_DRAWN = {f"drawn at {temperature}": temperature for temperature in (1, 4, 10, 15, 20, 30, 1000)}
RANDOM: dict[str, tuple[tuple[int, ...], ...]] = {"greedy": (_RANDOM_IDS,), **dict.fromkeys(_DRAWN, (_RANDOM_IDS,))}
_FIRST, _LENGTH = 5000, 200  # first token id and length of a text of consecutive ids, before tokens are left out


def _counted(kept: int, lost: int) -> tuple[int, ...]:
    """Return the token ids of a text that counts upwards with gaps.

    ``kept`` ascending ids are followed by a gap of ``lost`` missing ids, and so on. In each gap, one foreign token
    replaces the missing ids: 5000 … 5011, a foreign token, 5015 … 5026, and so on.

    A model that counts (`let_count`) generates the text without the gaps. So drafts copied from the text are rejected
    at each gap. The text's last token makes the model start at the first id.
    """
    text: list[int] = []
    for first in range(_FIRST, _FIRST + _LENGTH, kept + lost):
        text += [*range(first, first + kept), *([first + 20_000] if lost else [])]
    return *text, _FIRST - 1  # its successor is the first token


COUNTED: dict[str, tuple[tuple[int, ...], ...]] = {
    "counted quote": (_counted(_LENGTH, 0),),
    "counted edit": (_counted(39, 1),),
    "counted names": (_counted(12, 3),),
}
_SAMPLING: dict[str, dict[str, Any]] = {  # sampling parameters by kind of text; kinds that are not listed are greedy
    # The parameters of the chat app.
    **{turn: {"temperature": 0.7, "top_p": 0.95, "logprobs": 5} for turn in _TURNS},
    "nothing": {"temperature": 2.0, "ignore_eos": True},  # each token is unpredictable
    **{name: {"ignore_eos": True} for name in ("greedy", *COUNTED)},
    **{name: {"temperature": float(temperature), "ignore_eos": True} for name, temperature in _DRAWN.items()},
}


@dataclass(frozen=True)
class Options(ModelOptions):
    output_len: int = integer(200, 2, MAX_TOKENS, help="longest answer in tokens")
    runs: int = integer(3, 1, 100, help="runs of each, alternating; the result is their median")


@dataclass(frozen=True)
class SpeculationResult:
    """The result for one kind of text (``name``) and one method of speculation (``kind``: "lookup" or "model").

    ``plain`` is the median time per token without speculation, and ``guessing`` with speculation. Both are in seconds,
    and leave out the first token. In all runs together, ``num_guessed`` draft tokens were proposed, and ``num_right``
    of these were accepted. ``same``: speculation did not change the generated tokens.
    """

    name: str = shown("")
    kind: str = shown("by")
    num_tokens: int = shown("tokens", "d")
    plain: float = shown("ms/token", ".1f", 1e3)
    guessing: float = shown("speculating", ".1f", 1e3)
    speed_up: float = shown("speed-up", ".2f")
    tokens_per_step: float = shown("tokens/step", ".2f")
    num_guessed: int = shown("drafted", "d")
    num_right: int = shown("accepted", "d")
    same: bool = shown("same tokens")


def measure(subject: Subject, options: Options) -> Iterator[SpeculationResult]:
    """Measure each kind of text without speculation, by n-gram lookup, and with the draft model if there is one."""
    tokenizer, runner = subject.llm.engine.tokenizer, subject.llm.engine.runner
    ways = ["lookup"] if drafter_of(runner) is None else ["lookup", "model"]
    if tokenizer is None:
        yield from _measure_all(subject, RANDOM, ways, options)
        if let_count(runner.model):
            yield from _measure_all(subject, COUNTED, ["lookup"], options)
        return
    if not tokenizer.has_chat_template:
        yield from _measure_all(subject, PROMPTS, ways, options)
        return
    turns = list[SpeculationResult]()
    for result in _with_later_turns(subject, tokenizer, ways, options):
        yield result
        if result.name in _TURNS:
            turns.append(result)
    for kind in ways:
        yield _together([each for each in turns if each.kind == kind])


def _with_later_turns(
    subject: Subject, tokenizer: Tokenizer, ways: list[str], options: Options
) -> Iterator[SpeculationResult]:
    yield from _measure_all(subject, PROMPTS, ways, options)
    yield from _measure_all(subject, _later_turns(subject.llm, tokenizer, options), ways, options)


def _together(turns: list[SpeculationResult]) -> SpeculationResult:
    """Combine the results of the chats' first, second and third turns into one result.

    Times per token are averaged, weighted by the number of tokens of each turn.
    """
    num_tokens = sum(each.num_tokens for each in turns)
    plain, guessing = (sum(each.num_tokens * getattr(each, way) for each in turns) for way in ("plain", "guessing"))
    num_steps = sum(each.num_tokens / each.tokens_per_step for each in turns if each.tokens_per_step)
    return SpeculationResult(
        "all turns",
        turns[0].kind,
        num_tokens,
        plain / num_tokens,
        guessing / num_tokens,
        plain / guessing if guessing else 0.0,
        num_tokens / num_steps if num_steps else 0.0,
        sum(each.num_guessed for each in turns),
        sum(each.num_right for each in turns),
        all(each.same for each in turns),
    )


@torch.inference_mode()
def let_count(model: Llama) -> bool:
    """Overwrite the embedding and the output head so that token t + 1 follows token t. Return whether this worked.

    The embedding becomes so large that the layers do not matter. The head becomes the embedding shifted by one row.
    If the embedding and the head are one matrix, or low-bit, return False and change nothing.
    """
    embedding, head = model.embedding, model.head.weight
    if not isinstance(embedding, Tensor) or head.shape != embedding.shape or head.data_ptr() == embedding.data_ptr():
        return False
    embedding.mul_(1000)
    head.copy_(embedding.roll(1, 0))
    return True


def _measure_all(
    subject: Subject, prompts: Mapping[str, tuple[str | tuple[int, ...], ...]], kinds: list[str], options: Options
) -> Iterator[SpeculationResult]:
    for name, texts in prompts.items():
        asked = [_prompt_ids(subject.llm, text) for text in texts]
        yield from _measure(subject, name, asked, kinds, options)


def _measure(
    subject: Subject, name: str, asked: list[list[int]], kinds: list[str], options: Options
) -> list[SpeculationResult]:
    llm, engine = subject.llm, subject.llm.engine
    sampling = {"temperature": 0.0, **_SAMPLING.get(name, {})}
    seeds = _SEEDS if name in _TURNS else 1
    params = [SamplingParams(max_tokens=options.output_len, seed=seed, **sampling) for seed in range(seeds)]
    if name not in _FOLLOW_UPS:
        asked = [token_ids for token_ids in asked for _ in params]
    drafter = drafter_of(engine.runner)
    costs = [drafter.draft_cost if drafter is not None and kind == "model" else None for kind in kinds]
    guessing = [SpeculativeSamples(engine.requests, engine.runner, draft=cost) for cost in costs]
    ways: list[Samples] = [Samples(engine.requests, engine.runner), *guessing]
    seconds: list[list[float]] = [[] for _ in ways]
    answers: list[list[list[int]]] = [[] for _ in ways]
    num_steps = [0 for _ in ways]
    for run in range(1 + options.runs):  # the first run warms up
        for number in sorted(range(len(ways)), reverse=run % 2 == 0):
            llm.reset_prefix_cache()
            began = engine.figures.num_steps
            outputs = [
                _answer(engine, token_ids, params[i % len(params)], ways[number]) for i, token_ids in enumerate(asked)
            ]
            answers[number] = [output.outputs[0].token_ids for output in outputs]
            num_steps[number] += engine.figures.num_steps - began - len(asked)
            if run:
                seconds[number].append(sum(whole - first for first, _, whole in map(times_of, outputs)))
    # In 16 bits, rounding depends on the number of tokens per step, so an answer may differ.
    later_tokens = [sum(map(len, answer)) - len(asked) for answer in answers]
    plain, *guessed = (statistics.median(each) / max(1, n) for each, n in zip(seconds, later_tokens, strict=True))
    return [
        SpeculationResult(
            name,
            kind,
            tokens + len(asked),
            plain,
            time,
            plain / time if time else 0.0,
            (1 + options.runs) * tokens / max(1, steps),
            way.num_drafted,
            way.num_accepted,
            answer == answers[0],
        )
        for kind, way, time, steps, tokens, answer in zip(
            kinds, guessing, guessed, num_steps[1:], later_tokens[1:], answers[1:], strict=True
        )
    ]


def _later_turns(llm: LLM, tokenizer: Tokenizer, options: Options) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Generate the answers of all chats without speculation, for each seed. Return the prompts of the later turns.

    The result maps the name of a turn, such as "second turn", to its prompts as token ids. There is one prompt per chat
    and seed. It contains the whole chat before the turn.
    """
    engine = llm.engine
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS["chat"] for _ in range(_SEEDS)]
    params = [SamplingParams(max_tokens=options.output_len, seed=i, **_SAMPLING["chat"]) for i in range(_SEEDS)]
    way = Samples(engine.requests, engine.runner)
    turns = {}
    for turn, question in _FOLLOW_UPS.items():
        for i, chat in enumerate(chats):
            answer = _answer(engine, tokenizer.apply_chat_template(chat), params[i % _SEEDS], way).outputs[0].text
            chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        turns[turn] = tuple(tuple(tokenizer.apply_chat_template(chat)) for chat in chats)
    return turns


def _prompt_ids(llm: LLM, prompt: str | tuple[int, ...]) -> list[int]:
    if isinstance(prompt, tuple):
        return [token_id % llm.engine.requests.vocab_size for token_id in prompt]
    tokenizer = llm.engine.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        return llm.token_ids(prompt)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])


def _answer(engine: Engine, token_ids: list[int], params: SamplingParams, way: Samples) -> RequestOutput:
    engine.requests.add(Request(token_ids, params, request_id="answer"), way)
    while engine.has_work:
        engine.step()
    [output] = engine.take_finished()
    return output
