"""Speculation by lookup changes no token, and gives back every block that a wrong guess took."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lib.cache_checks import check
from lib.engine import change_logits, engine_for, run
from lib.models import hf_model, ours
from lib.speculation import assert_close_logprobs, counting_model, facts, guesses_of
from minillm.engine.engine import Engine
from minillm.engine.requests import Request
from minillm.grammar.grammar import Grammar
from minillm.llm import LLM
from minillm.model.llama import Llama
from minillm.params import BeamSearchParams, SamplingParams
from minillm.speculation import method as speculation
from minillm.speculation.draft_length import LookupDraftLength
from minillm.speculation.drafter import MOST_SEQS
from minillm.speculation.lookup import LONGEST_MATCH, Occurrences

LOOP = [11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model())


def some_params(rng: random.Random, number: int) -> Any:
    """Every option, in any combination that makes sense; few tokens are likely, so that many guesses are right."""
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": number}
    options["temperature"] = rng.choice((0, 0, 0.2, 0.7, 1.3))
    if rng.random() < 0.6:
        few = rng.sample(range(3, 96), rng.randint(1, 4))
        options |= rng.choice(({"allowed_token_ids": [*few, 2]}, {"logit_bias": dict.fromkeys(few, 9.0)}))
    choices: list[dict[str, Any]] = [
        {"n": rng.randint(2, 3)},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"logprobs": rng.randint(0, 3)},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"no_repeat_ngram_size": rng.randint(2, 4)},
        {"bad_words": [[rng.randrange(3, 96)], [rng.randrange(3, 96), rng.randrange(3, 96)]]},
        {"stop_token_ids": [rng.randrange(3, 96) for _ in range(6)]},
        {"min_tokens": rng.randint(0, options["max_tokens"]), "stop_token_ids": [rng.randrange(3, 96)]},
        {"ignore_eos": True},
        {"logits_processor": lambda prompt, answer, logits: logits.roll(len(answer) % 2)},
    ]
    for choice in rng.sample(choices, rng.randint(0, 4)):
        options |= choice
    return SamplingParams(**options)


def some_requests(rng: random.Random, count: int) -> list[tuple[list[int], Any]]:
    requests: list[tuple[list[int], Any]] = []
    for _ in range(count):
        part = [rng.randrange(3, 96) for _ in range(rng.randint(1, 15))]
        params = some_params(rng, rng.getrandbits(30))
        if rng.random() < 0.05:
            params = BeamSearchParams(beam_width=2, max_tokens=8)
        requests.append((part * rng.randint(1, 3), params))
    return requests


def assert_same(plain: list[Any], guessed: list[Any]) -> None:
    for one, other in zip(plain, guessed, strict=True):
        assert facts(one) == facts(other)
        assert_close_logprobs(one, other)


@pytest.mark.parametrize(("on_device", "block_size"), [(False, 1), (True, 4)])
def test_tokens_are_the_same_whatever_the_options(model: Llama, block_size: int, on_device: bool) -> None:
    """Every request of a stream of random ones; `run` checks the books after each step."""
    rng = random.Random(block_size)
    right = 0
    streams = [some_requests(rng, rng.randint(1, 4)) for _ in range(24)]
    ample = engine_for(model, on_device=False, num_blocks=8192 // block_size, block_size=block_size)
    plain = iter(run(ample, list(itertools.chain(*streams))))
    for requests in streams:
        engine = engine_for(
            model, on_device=on_device, speculate="lookup", num_blocks=1024 // block_size, block_size=block_size
        )
        assert_same(list(itertools.islice(plain, len(requests))), run(engine, requests))
        right += guesses_of(engine).num_accepted
    assert right > 150, "too few guesses were right to mean anything"


@pytest.mark.soak
def test_thousands_of_requests_have_the_same_tokens(model: Llama) -> None:
    rng = random.Random(9)
    for _ in range(1500):
        requests = some_requests(rng, rng.randint(1, 4))
        size: dict[str, Any] = {"num_blocks": rng.choice((60, 256)), "host_blocks": rng.choice((0, 64))}
        plain = run(engine_for(model, num_blocks=256, on_device=False), requests)
        assert_same(plain, run(engine_for(model, speculate="lookup", admission="optimistic", **size), requests))


@pytest.mark.parametrize("host_blocks", [0, 64], ids=["recompute", "swap"])
def test_preemption_and_chunks_of_prompts_change_nothing(model: Llama, host_blocks: int) -> None:
    rng = random.Random(3)
    bias = dict.fromkeys(LOOP, 9.0)
    params = [
        SamplingParams(temperature=0.3, seed=i, n=1 + i, max_tokens=40, ignore_eos=True, logit_bias=bias)
        for i in range(2)
    ]
    requests: list[tuple[list[int], Any]] = [(LOOP * 3 + [20 + i], each) for i, each in enumerate(params)]
    requests.append(([rng.randrange(3, 96) for _ in range(60)], SamplingParams(temperature=0, max_tokens=4)))
    plain = run(engine_for(model, num_blocks=256), requests)
    engine = engine_for(
        model, num_blocks=30, max_num_seqs=8, max_num_batched_tokens=12, host_blocks=host_blocks,
        admission="optimistic", speculate="lookup",
    )  # fmt: skip
    assert_same(plain, run(engine, requests))
    assert engine.scheduler.preemption.count > 0
    assert guesses_of(engine).num_accepted > 0
    assert (engine.scheduler.preemption.swap.num_swapped_out > 0) == (host_blocks > 0)


def looping(max_tokens: int = 30, **options: Any) -> tuple[list[int], Any]:
    """A request whose answer is ``LOOP`` over and over where the model is `loops`."""
    return LOOP * 2, SamplingParams(temperature=0, max_tokens=max_tokens, **options)


@pytest.fixture
def loops(model: Llama, monkeypatch: pytest.MonkeyPatch) -> Llama:
    """The model, but each token of ``LOOP`` is followed by the next one of it."""
    following = {token: LOOP[(place + 1) % len(LOOP)] for place, token in enumerate(LOOP)}

    def forced(batch: Any, logits: Any) -> Any:
        for row, place in enumerate(batch.logit_rows.tolist()):
            logits[row, following.get(int(batch.token_ids[place]), 3)] = 1e4
        return logits

    change_logits(monkeypatch, forced)
    return model


def steps_and_output(engine: Engine, request: tuple[list[int], Any]) -> tuple[int, Any]:
    [output] = run(engine, [request])
    return engine.figures.num_steps, output


def test_right_guesses_come_several_at_a_step(loops: Llama) -> None:
    plain, output = steps_and_output(engine_for(loops, on_device=False), looping())
    engine = engine_for(loops, on_device=False, speculate="lookup")
    fewer, same = steps_and_output(engine, looping())
    assert output.outputs[0].token_ids == (LOOP * 6) == same.outputs[0].token_ids
    assert plain == 30
    assert fewer <= 7, "1, then 1 + 3, 1 + 6, 1 + 8 and 1 + 8 tokens"
    assert guesses_of(engine).num_accepted == guesses_of(engine).num_drafted


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("end", ["max_tokens", "stop", "eos"])
def test_an_answer_ends_at_any_of_the_guesses(loops: Llama, length: int, end: str) -> None:
    """By its length, a token of its own, or the model's end token, at each place of an accepted run."""
    options: dict[str, Any] = {"max_tokens": length} if end == "max_tokens" else {"max_tokens": 30}
    ends = LOOP[(length - 1) % 5]
    if end == "stop":
        options |= {"stop_token_ids": [ends], "min_tokens": 0}
    eos = frozenset({ends}) if end == "eos" else frozenset()
    request = (LOOP * 2, SamplingParams(temperature=0, **options))
    results = []
    for speculate in ("off", "lookup"):
        engine = engine_for(loops, on_device=False, speculate=speculate, eos=eos)
        results.append(facts(run(engine, [request])[0]))
    assert results[0] == results[1]


def test_held_answers_can_be_forked_from(loops: Llama) -> None:
    """A held sequence's table ends where its computed tokens do, wherever among guesses the answer ended."""
    for length in range(1, 14):
        engine = engine_for(loops, on_device=False, speculate="lookup")
        request = Request(LOOP * 2, SamplingParams(temperature=0, max_tokens=length), request_id="a", hold=True)
        group = engine.add(request)
        while engine.has_work:
            engine.step()
            check(engine.cache)
        sequence = group.sequences[0]
        assert sequence.num_computed == sequence.own_table.num_tokens == len(sequence.token_ids) - 1


def test_right_guesses_are_not_made_beyond_the_answer(loops: Llama) -> None:
    """Of the last token that an answer may have, nothing is computed behind it."""
    engine = engine_for(loops, on_device=False, speculate="lookup")
    run(engine, [looping(max_tokens=3)])
    assert guesses_of(engine).num_drafted == 1, "the prompt gives one token, a guess and the token behind it the others"


def test_what_would_fail_behind_a_wrong_guess_fails_nothing(model: Llama) -> None:
    """Behind a token that is never drawn, no allowed token would be left."""
    allowed = [20, 21]
    bad = [[30, each] for each in allowed]
    params = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=allowed, bad_words=bad, ignore_eos=True)
    prompt = [9, 20, 30, 7, 9, 21, 30, 7, 9]
    plain = run(engine_for(model, on_device=False), [(prompt, params)])
    engine = engine_for(model, on_device=False, speculate="lookup")
    assert_same(plain, run(engine, [(prompt, params)]))
    assert plain[0].error is None
    assert guesses_of(engine).num_drafted > guesses_of(engine).num_accepted


def test_aborts_give_every_block_back(loops: Llama) -> None:
    for when in range(5):
        engine = engine_for(loops, on_device=False, speculate="lookup")
        engine.add_request("a", *looping())
        for _ in range(when):
            engine.step()
        if "a" not in engine.requests.groups:
            assert when > 2, "it ends so soon where guesses cost little"
            break
        tokens = engine.requests.groups["a"].sequences[0].token_ids
        assert tokens[10:] == (LOOP * 6)[: len(tokens) - 10]
        engine.abort("a")
        engine.step()
        check(engine.cache)
        assert engine.cache.num_free == engine.cache.num_blocks


def test_wrong_guesses_are_never_found_in_the_prefix_cache(model: Llama) -> None:
    """Blocks that the cache can find hold the tokens that were computed: another engine's answers are the same."""
    rng = random.Random(5)
    engine = engine_for(model, block_size=1, num_blocks=512, speculate="lookup")
    for number in range(40):
        prompt = (LOOP * 3)[: rng.randint(3, 15)]
        request: tuple[list[int], Any] = (
            prompt, SamplingParams(temperature=1.0, seed=number % 7, max_tokens=20, logit_bias=dict.fromkeys(LOOP, 8.0))
        )  # fmt: skip
        assert_same(run(engine_for(model, block_size=1, num_blocks=512), [request]), run(engine, [request]))
    assert guesses_of(engine).num_drafted > guesses_of(engine).num_accepted > 0


def test_requests_that_must_be_asked_at_each_token_do_not_guess(loops: Llama) -> None:
    engine = engine_for(loops, on_device=False, speculate="lookup")
    run(engine, [looping(logits_processor=lambda prompt, answer, logits: logits)])
    assert guesses_of(engine).num_drafted == 0


def test_many_requests_do_not_guess(loops: Llama) -> None:
    engine = engine_for(loops, on_device=False, num_blocks=256, speculate="lookup")
    _, params = looping()
    run(engine, [(LOOP[i:] + LOOP[:i], params) for i in range(MOST_SEQS + 1)])
    assert guesses_of(engine).num_drafted == 0


def test_a_stop_string_ends_within_guesses(tiny_model: Path) -> None:
    """The text is cut where the string begins, also where the string came with others in one step."""
    prompt = "one two three " * 6
    sizes: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "dtype": "float32"}
    plain, guessed = LLM(str(tiny_model), **sizes), LLM(str(tiny_model), **sizes, speculate="lookup")
    ids = [plain.tokenizer.encode(each, add_special_tokens=False)[-1] for each in ("one", "two", " three", "e")]
    for seed in range(12):
        bias = dict.fromkeys(ids, 30.0)
        params = SamplingParams(seed=seed, max_tokens=40, logit_bias=bias, stop=["eee", "oo", "eth"], ignore_eos=True)
        one, other = plain.generate([prompt], params)[0], guessed.generate([prompt], params)[0]
        assert facts(one) == facts(other)
    assert guesses_of(guessed.engine).num_accepted > 20


def test_a_grammar_goes_the_old_way(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), device="cpu", num_blocks=64, speculate="lookup")
    params = SamplingParams(temperature=0, max_tokens=20, grammar=Grammar.regex("(ab)+"))
    assert set(llm.generate(["ababab"], params)[0].text) <= {"a", "b"}
    assert guesses_of(llm.engine).num_drafted == 0


# --- the index and the pace -------------------------------------------------------------------------------------------


def longest_match(texts: list[list[int]], text: list[int]) -> int:
    """The oracle: the longest end of ``text``, up to a limit, that something follows in any of ``texts``."""
    best = 0
    for other in texts:
        for end in range(1, len(other) - 1):
            length = 0
            while length < min(LONGEST_MATCH, len(text), end + 1) and text[-1 - length] == other[end - length]:
                length += 1
            best = max(best, length)
    return best if best >= 2 else 0


def test_the_index_finds_what_a_scan_finds() -> None:
    rng = random.Random(0)
    for _ in range(400):
        letters = rng.choice((3, 6, 20))
        texts = [[rng.randrange(letters) for _ in range(rng.randint(1, 30))] for _ in range(rng.randint(1, 3))]
        index, text = Occurrences(), texts[0]
        for each in texts:
            index.add(each, 0, len(each) - 1)
        source = index.source(text)
        found = () if source is None else source.tokens(4, text)
        length = longest_match(texts, text)
        assert bool(found) == bool(length)
        if found:
            # The tokens found do follow an end of that length, in one of the texts, repeated where it is text's own.
            ending = text[-length:]
            places = [
                (other, i + length)
                for other in texts
                for i in range(len(other) - length)
                if other[i : i + length] == ending
            ]
            assert any(other[at] == found[0] for other, at in places)
            assert any(
                other[at : at + 4][: len(found)] == list(found)[: len(other[at : at + 4])] for other, at in places
            )


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    index, text = Occurrences(), [1, 2, 3, 1, 2, 3, 1, 2]
    index.add(text, 0, len(text) - 1)
    source = index.source(text)
    assert source is not None
    assert source.tokens(7, text) == (3, 1, 2, 3, 1, 2, 3)


def test_a_text_may_go_on_with_what_it_has_parted_from() -> None:
    """Behind one other token, or several."""
    written, index = list(range(50)), Occurrences()
    index.add(written, 0, 50)
    source = index.source(text := [10, 11])
    assert source is not None
    assert source.tokens(4, text) == (12, 13, 14, 15)
    source.part(2)  # 12 and 13 were right, and something else came for 14
    for _ in range(3):
        assert source.tokens(2, text) == (15, 16)
        source.num_tries += 1
        source.part(0)
    assert source.tokens(3, text) == (15, 16, 17)
    source.num_tries += 1
    source.part(1)  # it went on with 15, and another token came for 16
    assert source.tokens(2, text) == (17, 18)
    assert not source.num_tries


def test_guesses_that_are_wrong_become_rare_and_right_ones_longer() -> None:
    pace = LookupDraftLength(speculation._CPU_COSTS)
    due = 0
    for _ in range(1000):
        if pace.is_due():
            due += 1
            pace.update(pace.count, 0)
    assert due <= 25
    for _ in range(80):
        if pace.is_due():
            pace.update(pace.count, pace.count)
    assert pace.count == 8
    assert pace.pause < 4


def test_a_text_that_repeats_nothing_is_computed_ahead_of_its_lookups(model: Llama) -> None:
    """A step waits for the one in front of it only where a source is known without that one's token."""
    for text, waits in (([*range(10, 50)], [False] * 4), ([7, 8, 9, 10] * 10, [True])):
        engine = engine_for(model, on_device=True, speculate="lookup")
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, bad_words=[[each] for each in text[:8]])
        method: Any = engine.add_request("r", text, params).method
        inner, flights = method.launch, list[Any]()
        method.launch = lambda *args, inner=inner, flights=flights: flights.append(inner(*args)) or flights[-1]
        while engine.has_work:
            engine.step()
        assert [flight.waits for flight in flights if isinstance(flight, speculation.PlainDraws)][: len(waits)] == waits


@pytest.mark.parametrize("on_device", [True, False])
def test_lookups_at_the_price_of_a_gpu_change_no_token(
    model: Llama, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    monkeypatch.setattr(speculation, "_draft_costs", lambda model: speculation._GPU_COSTS)
    text = [5, 9, 17, 33, 65, 7, 11]
    requests = [(text * 3, SamplingParams(max_tokens=60, temperature=t, seed=3, ignore_eos=True)) for t in (0, 0.7)]
    for each in requests:
        plain = run(engine_for(model, on_device=on_device), [each])
        engine = engine_for(model, on_device=on_device, speculate="lookup")
        assert [o.outputs[0].token_ids for o in run(engine, [each])] == [o.outputs[0].token_ids for o in plain]


def test_a_guess_is_tried_again_where_a_text_has_parted_from_what_it_repeats(
    model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that counts, behind a text in which foreign tokens stand for one number, or for three: fewer steps."""
    counting = counting_model(vocab_size=400)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for lost in (1, 3):
        text = [each for first in range(100, 200, 12) for each in (*range(first, first + 12 - lost), 300 + first // 12)]
        steps = []
        for resumptions in (0, 8):
            price = replace(speculation._GPU_COSTS, resumptions=resumptions)
            monkeypatch.setattr(speculation, "_draft_costs", lambda model, price=price: price)
            engine = engine_for(counting, num_blocks=128, speculate="lookup")
            [answer] = run(engine, [([*text, 99], params)])
            assert answer.outputs[0].token_ids == list(range(100, 200))
            steps.append(engine.figures.num_steps)
        assert steps[1] <= steps[0] - 5
