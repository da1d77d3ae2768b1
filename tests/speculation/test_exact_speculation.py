"""Test random requests with draft tokens: the same answers as without, under preemption and aborts."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch

from lib.engine import engine_for
from lib.models import hf_model, noisy, ours, write_tiny_model
from lib.speculation import assert_begins, assert_begins_at_error, assert_same, guesses_of, play
from minillm.engine.engine import Engine
from minillm.engine.requests import Request
from minillm.grammar.grammar import Grammar
from minillm.loading.engine import chat_options
from minillm.model.llama import Llama
from minillm.params import BeamSearchParams, SamplingParams
from minillm.speculation import method as speculation
from minillm.speculation.draft_length import LookupDraftLength
from minillm.speculation.drafts import num_accepted
from minillm.speculation.lookup import Occurrences
from minillm.text.tokenizer import Tokenizer
from minillm.ui.settings import for_desktop

SMALL = 56
REQUESTS = int(os.environ.get("MINILLM_SPECULATED_REQUESTS", SMALL))
WORDS = ("one", "two", " three", " and", "\n", "a", "b", " c")
GRAMMARS = [
    Grammar.regex("(ab|ba| c)+"),
    Grammar.choice(["one two", "two one", "one one"]),
    Grammar.json({"type": "boolean"}),
]


Parts = tuple[Llama, Tokenizer, int]
KINDS = ["lookup", "draft"]
SIZES: dict[str, Any] = {"vocab_size": 640, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def drafting() -> Llama:
    """Return a model close to that of `parts`, as a quantized one is: most draft tokens are accepted, but not all."""
    return noisy(hf_model(**SIZES), 0.05)


@pytest.fixture
def guesser(request: pytest.FixtureRequest, drafting: Llama) -> dict[str, Any]:
    """The options of an engine that looks guesses up, or has a draft model."""
    return {"speculate": "lookup"} if request.param == "lookup" else {"draft": drafting}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """A random model of text, its tokenizer and its end token."""
    directory = write_tiny_model(tmp_path_factory.mktemp("text"))
    tokenizer = Tokenizer.from_directory(directory)
    eos = tokenizer.eos_token_id
    assert eos is not None
    return ours(hf_model(**SIZES)), tokenizer, eos


def engine(parts: Parts, **options: Any) -> Engine:
    model, tokenizer, eos = parts
    return engine_for(model, tokenizer=tokenizer, eos=frozenset({eos}), **options)


def some_params(rng: random.Random, tokenizer: Tokenizer, eos: int) -> Any:
    """Return options in random valid combinations. Few tokens are likely, so many draft tokens are accepted."""
    few = [each for word in WORDS for each in tokenizer.encode(word, add_special_tokens=False)]
    few = rng.sample(few, rng.randint(1, 5))
    length = rng.randint(1, 48)
    options: dict[str, Any] = {"max_tokens": length, "seed": rng.getrandbits(40)}
    options["temperature"] = rng.choice((0, 0, 0.3, 0.8, 1.4))
    if rng.random() < 0.8:
        ends = [eos] if rng.random() < 0.5 else []
        bias = dict.fromkeys(few, 25.0) | dict.fromkeys(ends, 20.0)
        options |= rng.choice(({"allowed_token_ids": [*few, *ends]}, {"logit_bias": bias}))
    if rng.random() < 0.04:
        return BeamSearchParams(beam_width=rng.randint(1, 3), max_tokens=min(8, length))
    choices: list[dict[str, Any]] = [
        {"n": rng.randint(2, 3)},
        {"top_k": rng.randint(1, 9)},
        {"top_p": rng.choice((0.2, 0.8))},
        {"min_p": 0.1},
        {"logprobs": rng.randint(0, 3)},
        {"prompt_logprobs": 1},
        {"repetition_penalty": rng.choice((0.8, 1.3))},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"no_repeat_ngram_size": rng.randint(2, 5)},
        {"bad_words": [rng.choice(WORDS), [few[0], few[-1]]]},
        {"stop": rng.sample(["oneo", "aa", "ba", "\n\n", "e", "two", " c c", "ab\n"], rng.randint(1, 3))},
        {"stop": ["aaa", "oneone"], "min_tokens": rng.randint(0, length)},
        {"stop_token_ids": few[:1]},
        {"stop_token_ids": few[:1], "min_tokens": rng.randint(0, length)},
        {"ignore_eos": True},
        {"grammar": rng.choice(GRAMMARS)},
        {"logits_processor": lambda prompt, answer, logits: logits.roll(len(answer) % 2)},
    ]
    for choice in rng.sample(choices, rng.randint(0, 4)):
        options |= choice
    if "bad_words" in options and "allowed_token_ids" in options:
        options["bad_words"] = options["bad_words"][1:]  # no token by itself: one must be left
    if "grammar" in options:  # what it asks for must be allowed
        options = {name: value for name, value in options.items() if name not in ("allowed_token_ids", "bad_words")}
    return SamplingParams(**options)


def some_requests(rng: random.Random, tokenizer: Tokenizer, eos: int) -> list[Request]:
    requests = []
    for number in range(rng.randint(1, 5)):
        text = "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 8))) * rng.randint(1, 4)
        ids = tokenizer.encode(text, add_special_tokens=False)
        salt = rng.choice((None, None, "salt"))
        requests.append(Request(ids, some_params(rng, tokenizer, eos), request_id=str(number), salt=salt))
    return requests


def some_sizes(rng: random.Random, requests: list[Request]) -> dict[str, Any]:
    """An engine with guesses: a pool that is wide, or just large enough for the largest request alone."""
    size = rng.choice((1, 4, 16))
    needed = (
        -(-len(each.token_ids) // size) + each.params.num_sequences * (each.params.max_tokens // size + 2)
        for each in requests
    )
    return {
        "block_size": size,
        "num_blocks": max(needed) + rng.choice((0, 0, 4, 1024 // size)),
        "host_blocks": rng.choice((0, 64)),
        "max_num_batched_tokens": rng.choice((12, 64)),
        "admission": rng.choice(("predicted", "optimistic", "optimistic")),
        "prefix_caching": rng.random() < 0.8,
        "on_device": rng.random() < 0.3,
    }


@dataclass
class Counts:
    """Counts of the events in random requests."""

    asked: int = 0
    aborted: int = 0
    preempted: int = 0
    swapped: int = 0  # blocks, back from the host
    guessed: int = 0
    right: int = 0
    ended_within: int = 0


def compare_random_requests(parts: Parts, guessers: list[dict[str, Any]], count: int) -> Counts:
    """Compare ``count`` random requests with and without draft tokens, preempted and aborted at any step.

    ``guessers`` are options of engines, which take turns.
    """
    _, tokenizer, eos = parts
    counts, rng, turns = Counts(), random.Random(21), cycle(guessers)
    while counts.asked < count:
        requests = some_requests(rng, tokenizer, eos)
        sizes = some_sizes(rng, requests)
        arrivals = [rng.choice((0, 0, rng.randint(0, 30))) for _ in requests]
        aborts = {rng.randint(0, 40): rng.choice(requests).request_id for _ in range(rng.choice((0, 0, 1)))}
        plain = engine(parts, num_blocks=512, on_device=False, host_blocks=0)
        expected = play(plain, requests, [0] * len(requests), {})
        guessing = engine(parts, **sizes, **next(turns))
        found = play(guessing, requests, arrivals, aborts)
        for each in requests:
            name = each.request_id
            if name in aborts.values():
                counts.aborted += 1
                if isinstance(each.params, SamplingParams):  # the best beams so far are no beginning of the best ones
                    assert_begins(found[name], expected[name])
            else:
                assert_same(expected[name], found[name])
                counts.ended_within += found[name].outputs[0].finish_reason == "stop"
        counts.asked += len(requests)
        counts.right += guesses_of(guessing).num_accepted
        counts.guessed += guesses_of(guessing).num_drafted
        counts.preempted += guessing.scheduler.preemption.count
        counts.swapped += guessing.scheduler.preemption.swap.num_swapped_in
    print(counts)
    assert counts.right > counts.asked
    assert counts.guessed > counts.right
    assert counts.preempted > counts.asked // 200
    assert counts.ended_within > counts.asked // 20
    return counts


@pytest.mark.parametrize("guesser", KINDS, indirect=True)
def test_random_requests_with_every_option(parts: Parts, guesser: dict[str, Any]) -> None:
    """``MINILLM_SPECULATED_REQUESTS`` says how many they are."""
    compare_random_requests(parts, [guesser], REQUESTS)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_ten_thousand_requests_have_the_same_tokens_with_draft_models(parts: Parts, drafting: Llama) -> None:
    """The draft models agree with the model nearly always, hardly ever, and always."""
    drafts = drafting, ours(hf_model(seed=9, num_hidden_layers=1, **SIZES)), parts[0]
    counts = compare_random_requests(parts, [{"draft": draft} for draft in drafts], 10_000)
    assert min(counts.aborted, counts.preempted, counts.swapped, counts.right) > 100


# --- faults -----------------------------------------------------------------------------------------------------------


def looping(tokenizer: Tokenizer, count: int = 3, **options: Any) -> list[Request]:
    """Return requests with repetitive answers, so that nearly every step has draft tokens."""
    requests = []
    for number in range(count):
        ids = tokenizer.encode("one two three " * 4, add_special_tokens=False)
        bias = dict.fromkeys(ids[-3:-1], 30.0)
        params = SamplingParams(
            max_tokens=40, seed=number, temperature=0.5, ignore_eos=True, logit_bias=bias, **options
        )
        requests.append(Request(ids, params, request_id=str(number)))
    return requests


@pytest.mark.parametrize(
    ("owner", "name"), [(Occurrences, "add"), (Occurrences, "source"), (LookupDraftLength, "update")]
)
def test_a_lookup_that_fails_costs_no_answer(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Wherever it fails, once or always: the answers come, only without guesses."""
    requests = looping(parts[1], n=2)[:2]
    expected = play(engine(parts, num_blocks=256), requests, [0, 0], {})
    whole = getattr(owner, name)
    for first, last in ((0, 1), (3, 4), (7, 8), (0, 10**9), (9, 10**9)):
        calls = iter(range(10**9))

        def breaking(*arguments: Any, calls: Any = calls, first: int = first, last: int = last) -> Any:
            if first <= next(calls) < last:
                raise RuntimeError("a seeded fault")
            return whole(*arguments)

        monkeypatch.setattr(owner, name, breaking)
        guessing = engine(parts, num_blocks=256, speculate="lookup")
        found = play(guessing, requests, [0, 0], {})
        for each in requests:
            assert_same(expected[each.request_id], found[each.request_id])


@pytest.mark.parametrize("guesser", KINDS, indirect=True)
@pytest.mark.parametrize("where", ["run", "draw_drafts", "wait"])
def test_a_step_that_fails_takes_its_own_requests_only(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, where: str, guesser: dict[str, Any]
) -> None:
    """A failure at any step of a stream: requests end with the error, or with their whole answers, in time."""
    rng = random.Random(where)
    _, tokenizer, eos = parts
    broken = whole = 0
    calls, every = iter(range(10**9)), 25 if where == "run" else 8  # a run that fails takes all that runs
    for number in range(6):
        requests = looping(tokenizer) if number % 2 else some_requests(rng, tokenizer, eos)
        arrivals = [rng.randint(0, 12) for _ in requests]
        expected = play(engine(parts, num_blocks=512), requests, arrivals, {})
        guessing = engine(parts, num_blocks=512, host_blocks=32, **guesser)
        owners: dict[str, Any] = {
            "run": type(guessing.runner),
            "draw_drafts": speculation.SpeculativeSamples,
            "wait": speculation.Verification,
        }
        owner = owners[where]
        done = getattr(owner, where)

        def breaking(*arguments: Any, done: Any = done) -> Any:
            result = done(*arguments)
            if next(calls) % every == 5:
                raise RuntimeError("a seeded fault")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, where, breaking)
            found = play(guessing, requests, arrivals, {}, lambda error: "a seeded fault" in str(error))
        for each in requests:
            output = found[each.request_id]
            if output.error in (None, expected[each.request_id].error):
                assert_same(expected[each.request_id], output)
                whole += 1
            else:
                assert "a seeded fault" in output.error
                assert_begins_at_error(output, expected[each.request_id])
                broken += 1
        again = play(guessing, requests, arrivals, {})
        for each in requests:
            assert_same(expected[each.request_id], again[each.request_id])
    assert whole
    assert broken


@pytest.mark.parametrize("guesser", KINDS, indirect=True)
def test_an_abort_at_every_step_leaves_nothing(parts: Parts, guesser: dict[str, Any]) -> None:
    requests = looping(parts[1], n=2)[:2]
    expected = play(engine(parts, num_blocks=256), requests, [0, 0], {})
    for step in range(20):
        found = play(engine(parts, num_blocks=256, **guesser), requests, [0, 0], {step: "0"})
        assert_begins(found["0"], expected["0"])
        assert_same(expected["1"], found["1"])


def test_a_chat_on_a_cpu_guesses_unless_it_is_told_not_to() -> None:
    assert chat_options({"device": "cpu"}) == {"device": "cpu", "speculate": "lookup"}
    for other in (
        {"speculate": "off"}, {"tensor_parallel_size": 2}, {"weights": "int8"}, {"weights": "stored"},
        {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"},
    ):  # fmt: skip
        assert chat_options({"device": "cpu", **other}) == {"device": "cpu", **other}
    asked = for_desktop({"device": "cpu"})
    assert chat_options(asked) == {**asked, "speculate": "lookup"}, "as the chat asks"


def test_a_chat_on_a_gpu_keeps_no_copy_unless_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.loading.engine.choose_device", lambda config: torch.device("cuda"))
    assert chat_options({"pool_tokens": 99}) == {"weights": "stored", "max_num_seqs": 64, "pool_tokens": 99}
    assert chat_options({"max_num_seqs": 9})["max_num_seqs"] == 9
    assert chat_options({"weights": "both"})["weights"] == "both"
    for other in ({"num_blocks": 9}, {"gpu_memory_utilization": 0.5}):
        assert chat_options(other) == other


@pytest.mark.parametrize("guesser", KINDS, indirect=True)
def test_sequences_count_their_guessed_tokens(parts: Parts, guesser: dict[str, Any]) -> None:
    guessing = engine(parts, num_blocks=256, **guesser)
    groups = [guessing.add(request) for request in looping(parts[1], n=2)[:2]]
    while guessing.has_work:
        guessing.step()
    counts = [num_accepted(group, sequence.index) for group in groups for sequence in group.sequences]
    assert sum(counts) == guesses_of(guessing).num_accepted
    assert min(counts) > 0
