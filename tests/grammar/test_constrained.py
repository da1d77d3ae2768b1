"""Test answers under a grammar from the whole engine, with independent checkers."""

from __future__ import annotations

import datetime
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lib.cache_checks import check
from lib.engine import engine_for, run
from lib.models import DEVICE, hf_model, ours, write_tiny_model
from lib.schemas import BOUNDED, INTEGER, SCHEMAS, record
from minillm import LLM, BeamSearchParams, Grammar, SamplingParams
from minillm.model.llama import Llama
from minillm.outputs import RequestOutput
from minillm.params import Params
from minillm.text.tokenizer import Tokenizer

FORMATS = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "uuid"))


def rfc3339(text: str) -> str:
    """The text as Python reads it, which knows neither small letters nor leap seconds."""
    return text.upper().replace(":60", ":59")


FORMATS.checks("time", raises=ValueError)(lambda text: datetime.time.fromisoformat(rfc3339(text)) is not None)
FORMATS.checks("date-time", raises=ValueError)(lambda text: datetime.datetime.fromisoformat(rfc3339(text)) is not None)

EXPRESSIONS = (
    r"[a-c]{2,9}x",
    r"(yes|no|maybe)(, (yes|no|maybe)){0,3}",
    r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]",
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
    r"\p{Lu}?[é🎉]{3}[^a-z]{0,2}",
    r"a?b?c?d",
)
CHOICES = ("red", "reddish", "green", "naïve 🎉", "a\nb", '"quoted"')
# It compiles, and takes too much time at its second token.
FAILING = Grammar.lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)) + '\nr30: "a"')


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(str(directory), device="cpu", num_blocks=1500, block_size=4, max_num_seqs=256)


@pytest.fixture(autouse=True)
def balanced(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        check(llm.engine.cache)
        assert llm.cache_stats().free_blocks == 1500, "blocks leaked"


@pytest.fixture(scope="module")
def parts(directory: Path) -> tuple[Llama, Tokenizer]:
    tokenizer = Tokenizer.from_directory(directory)
    return ours(hf_model(vocab_size=640, max_position_embeddings=512)), tokenizer


def results(
    parts: tuple[Llama, Tokenizer], requests: list[tuple[list[int], Any]], **options: Any
) -> list[RequestOutput]:
    """Return the outputs of an engine. Check its bookkeeping after every step."""
    model, tokenizer = parts
    assert tokenizer.eos_token_id is not None
    eos = frozenset({tokenizer.eos_token_id})
    sizes = {"num_blocks": 600, "block_size": 4, "max_num_seqs": 128, **options}
    return run(engine_for(model, tokenizer=tokenizer, eos=eos, **sizes), requests)


def texts(outputs: list[RequestOutput]) -> list[list[tuple[str, str | None]]]:
    assert not [output.error for output in outputs if output.error]
    return [[(each.text, each.finish_reason) for each in output.outputs] for output in outputs]


def assert_valid(text: str, schema: Any) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_fifty_schemas_in_one_batch_of_samples_and_beams(llm: LLM) -> None:
    """Each ended answer is valid, and most answers of a random model end."""
    assert len(SCHEMAS) == 50
    requests: list[tuple[Any, Params]] = []
    for schema in SCHEMAS.values():
        grammar = Grammar.json(schema)
        requests.append((schema, SamplingParams(grammar=grammar, n=3, max_tokens=300, seed=len(requests))))
        requests.append((schema, BeamSearchParams(grammar=grammar, beam_width=3, max_tokens=120)))
    outputs = llm.generate(["x"] * len(requests), [params for _, params in requests])
    ended: dict[type, list[bool]] = {SamplingParams: [], BeamSearchParams: []}
    for (schema, params), answers in zip(requests, texts(outputs), strict=True):
        for text, reason in answers:
            ended[type(params)].append(reason == "stop")
            if reason == "stop":
                assert_valid(text, schema)
            else:
                assert reason == "length"
    assert sum(ended[SamplingParams]) > 0.9 * len(ended[SamplingParams]) > 130
    assert sum(ended[BeamSearchParams]) > 0.7 * len(ended[BeamSearchParams]) > 70


@pytest.mark.soak
def test_a_thousand_answers_by_fifty_schemas(llm: LLM) -> None:
    """Each answer is valid and ends, because the schemas bound its length."""
    assert len(BOUNDED) == 50
    for start in range(0, 20, 2):
        asked = [(name, number) for name in BOUNDED for number in range(start, start + 2)]
        prompts = [f"Say {name} as JSON:\n" for name, _ in asked]
        params = [SamplingParams(grammar=Grammar.json(BOUNDED[n]), max_tokens=800, seed=seed) for n, seed in asked]
        outputs = llm.generate(prompts, params)
        for (name, _), [(text, reason)] in zip(asked, texts(outputs), strict=True):
            assert reason == "stop", (name, text[-200:])
            assert_valid(text, BOUNDED[name])


def test_the_validator_of_these_tests_finds_faults() -> None:
    for name, text in (("a record", '{"name": "x"}'), ("a date", '"2024-02-40"'), ("a time", '"25:00:00Z"')):
        with pytest.raises(jsonschema.ValidationError):
            assert_valid(text, SCHEMAS[name])


def test_any_json_object(llm: LLM) -> None:
    params = SamplingParams(grammar=Grammar.json(), n=12, max_tokens=250, seed=3)
    answers = texts(llm.generate(["x"], params))[0]
    complete = [json.loads(text) for text, reason in answers if reason == "stop"]
    assert complete
    assert all(isinstance(value, dict) for value in complete)


# --- expressions, choices, Lark ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [False, True])
def test_answers_match_their_expressions(llm: LLM, beams: bool) -> None:
    made = [Grammar.regex(each) for each in EXPRESSIONS]
    params: list[Params] = [
        BeamSearchParams(grammar=grammar, beam_width=4, max_tokens=60)
        if beams
        else SamplingParams(grammar=grammar, n=8, max_tokens=60, seed=1)
        for grammar in made
    ]
    for pattern, answers in zip(EXPRESSIONS, texts(llm.generate(["x"] * len(made), params)), strict=True):
        python = pattern.replace(r"\p{Lu}", "[^\\W\\da-z_]")
        assert all(reason == "stop" for _, reason in answers)
        assert all(re.fullmatch(python, text) for text, _ in answers), (pattern, answers)
        assert len({text for text, _ in answers}) > 1


def test_groups_of_beams_follow_a_grammar(llm: LLM) -> None:
    options: dict[str, Any] = {"grammar": Grammar.regex("[a-z ]{3,30}"), "max_tokens": 40}
    alone, groups = llm.generate(
        ["x", "x"],
        [
            BeamSearchParams(beam_width=2, **options),
            BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=0.0, **options),
        ],
    )
    assert groups.error is None
    found = [completion.token_ids for completion in groups.outputs]
    assert sorted(found) == sorted([completion.token_ids for completion in alone.outputs] * 2)


def test_answers_are_among_the_choices(llm: LLM) -> None:
    grammar = Grammar.choice(CHOICES)
    [samples] = texts(llm.generate(["x"], SamplingParams(grammar=grammar, n=64, seed=2, max_tokens=20)))
    assert {text for text, _ in samples} == set(CHOICES)
    assert {reason for _, reason in samples} == {"stop"}
    [beams] = texts(llm.generate(["x"], BeamSearchParams(grammar=grammar, beam_width=6)))
    assert {text for text, _ in beams} <= set(CHOICES)


def test_a_lark_grammar_counts(llm: LLM) -> None:
    """A Lark grammar, unlike a regular expression, can require equal numbers of opening and closing brackets."""
    grammar = Grammar.lark('start: "(" start ")" | "x"')
    [answers] = texts(llm.generate(["x"], SamplingParams(grammar=grammar, n=16, max_tokens=80, seed=2)))
    complete = [text for text, reason in answers if reason == "stop"]
    assert len(set(complete)) > 1
    for text in complete:
        assert text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2)


# --- ends -------------------------------------------------------------------------------------------------------------


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, add_special_tokens=False)


def test_an_answer_ends_with_its_grammar_and_needs_no_end_token(llm: LLM) -> None:
    for params in (SamplingParams(grammar=Grammar.regex("[ab]{4}"), ignore_eos=True),
                   BeamSearchParams(grammar=Grammar.regex("[ab]{4}"), ignore_eos=True, beam_width=2)):  # fmt: skip
        answer = llm.generate(["x"], params)[0].outputs[0]
        assert answer.finish_reason == "stop"
        assert answer.stop_reason is None
        assert b"".join(map(llm.tokenizer.token_bytes, answer.token_ids)).decode() == answer.text


def test_the_model_may_end_where_the_grammar_lets_it(llm: LLM) -> None:
    """An end token is sampled at each place where the text is complete, and nowhere else."""
    eos = llm.engine.requests.eos_token_ids
    bias = dict.fromkeys(eos, 1.0)
    params = SamplingParams(grammar=Grammar.regex("(ab){1,3}"), n=64, seed=1, max_tokens=20, logit_bias=bias)
    [output] = llm.generate(["x"], params)
    found = {each.text for each in output.outputs}
    assert found == {"ab", "abab", "ababab"}
    for each in output.outputs:
        assert (each.token_ids[-1] in eos) == (each.text != "ababab")


def test_end_tokens_of_the_request_end_only_complete_texts(llm: LLM) -> None:
    [b] = ids_of(llm, "b")
    params = SamplingParams(grammar=Grammar.regex("a+b?a*"), stop_token_ids=[b], n=16, seed=1, max_tokens=30)
    for each in llm.generate(["x"], params)[0].outputs:
        assert re.fullmatch("a+b?a*", each.text), "b ends the answer: its own text is no part of it"
        if each.stop_reason == b:
            assert each.token_ids[-1] == b
    params = SamplingParams(grammar=Grammar.regex("[ac][bd][ac]"), stop_token_ids=[b], n=32, seed=1, max_tokens=9)
    [output] = llm.generate(["x"], params)
    assert output.error is None
    assert all(re.fullmatch("[ac][bd][ac]", each.text) for each in output.outputs)
    [output] = llm.generate(["x"], SamplingParams(grammar=Grammar.choice(["xb"]), stop_token_ids=[b], max_tokens=9))
    assert output.error is not None
    assert output.error.startswith("no token is possible any more")


def test_min_tokens_hold_the_end_back_but_not_beyond_the_grammar(llm: LLM) -> None:
    long = SamplingParams(grammar=Grammar.regex("a*"), min_tokens=9, max_tokens=40, n=8, seed=4)
    short = SamplingParams(grammar=Grammar.regex("a{1,3}"), min_tokens=9, max_tokens=40, n=8, seed=4)
    for each in llm.generate(["x"], long)[0].outputs:
        assert len(each.token_ids) >= 9
    for each in llm.generate(["x"], short)[0].outputs:
        assert each.finish_reason == "stop"
        assert each.text == "aaa"


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_a_grammar_and_other_bounds_hold_together(llm: LLM, kind: Any) -> None:
    """Both ban tokens. If none is left, the request fails, or the search loses all beams."""
    several = {"n": 8, "seed": 5} if kind is SamplingParams else {"beam_width": 4}
    [a], [b] = ids_of(llm, "a"), ids_of(llm, "b")
    grammar = Grammar.regex("[a-d]{4}")
    params = kind(grammar=grammar, allowed_token_ids=[a, b], bad_words=[[b, b]], **several)
    answers = texts(llm.generate(["x"], params))[0]
    assert len({text for text, _ in answers}) > 1
    for text, reason in answers:
        assert reason == "stop"
        assert re.fullmatch("[ab]{4}", text)
        assert "bb" not in text
    biased = kind(grammar=grammar, logit_bias={a: 100.0}, **several)
    assert texts(llm.generate(["x"], biased))[0][0][0] == "aaaa"
    [free, failed] = llm.generate(["x"] * 2, [kind(max_tokens=3, **several), kind(grammar=Grammar.choice(["cd"]),
                                  allowed_token_ids=[a, b], **several)])  # fmt: skip
    assert free.error is None
    assert failed.error is not None
    assert "no token is possible any more" in failed.error


def test_max_tokens_and_stop_strings_cut_an_answer(llm: LLM) -> None:
    cut = llm.generate(["x"], SamplingParams(grammar=Grammar.regex("(ab){50}"), max_tokens=4))[0].outputs[0]
    assert cut.finish_reason == "length"
    assert re.fullmatch("(ab){1,49}a?|a", cut.text)
    stopped = llm.generate(["x"], SamplingParams(grammar=Grammar.regex("a{5}-a{5}"), stop=["-"]))[0].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("aaaaa", "stop", "-")
    beam = llm.generate(["x"], BeamSearchParams(grammar=Grammar.regex("a{5}-a{5}"), stop=["-"]))[0].outputs[0]
    assert (beam.text, beam.finish_reason, beam.stop_reason) == ("aaaaa", "stop", "-")


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    grammar = Grammar.choice(["red", "green"])
    [answer] = llm.generate(["x"], SamplingParams(grammar=grammar, logprobs=0, seed=1))[0].outputs
    assert answer.logprobs is not None
    ids = llm.token_ids("x")
    for number, token in enumerate(answer.logprobs):
        with llm.branch(ids + answer.token_ids[:number]) as branch:
            free = dict(branch.logprobs(64))
        assert token.logprob < 0
        if token.token_id in free:
            assert token.logprob == pytest.approx(free[token.token_id], abs=1e-4)
        else:
            assert token.logprob <= min(free.values()) + 1e-4


# --- beside others ----------------------------------------------------------------------------------------------------


def mixed(rng: random.Random, tokenizer: Tokenizer) -> tuple[list[int], Any]:
    prompt = [rng.randrange(10, 590) for _ in range(rng.randint(1, 24))]
    grammar: Any = rng.choice(
        [None, None, Grammar.regex("[a-c]{2,9}x"), Grammar.choice(CHOICES), Grammar.json(SCHEMAS["a record"]), FAILING]
    )
    if rng.random() < 0.3:
        return prompt, BeamSearchParams(grammar=grammar, beam_width=rng.randint(1, 4), max_tokens=12, logprobs=1)
    temperature = rng.choice([0, 0.8])
    return prompt, SamplingParams(
        grammar=grammar, n=rng.randint(1, 3), seed=rng.randrange(99), temperature=temperature, max_tokens=14, logprobs=2
    )


def assert_alike(one: RequestOutput, other: RequestOutput) -> None:
    assert (one.error is None) == (other.error is None)
    for a, b in zip(one.outputs, other.outputs, strict=True):
        assert (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 600},
        {"num_blocks": 40, "admission": "optimistic"},
        {"num_blocks": 40, "admission": "optimistic", "host_blocks": 80},
        {"num_blocks": 600, "on_device": True},
    ],
    ids=["room", "recompute", "swap", "rows on the device"],
)
def test_a_mix_of_requests_gives_what_each_gives_alone(parts: tuple[Llama, Tokenizer], options: dict[str, Any]) -> None:
    """Run requests with grammars, without, and with failing ones, while groups are preempted."""
    rng = random.Random(7)
    requests = [mixed(rng, parts[1]) for _ in range(24)]
    together = results(parts, requests, **options)
    failed = 0
    for request, output in zip(requests, together, strict=True):
        [alone] = results(parts, [request])
        assert_alike(output, alone)
        failed += output.error is not None
        assert (output.error is None) == (request[1].grammar != FAILING), output.error
    assert failed
    preempted = sum(output.metrics.num_preemptions for output in together if output.metrics is not None)
    assert (preempted > 0) == (options["num_blocks"] == 40)


def test_a_grammar_that_fails_fails_alone(llm: LLM) -> None:
    """Let grammars fail while they take a token, and while their mask is computed."""
    later = Grammar.regex(r"(\w{1,100}\s?\p{L}+){100}")
    params: list[Params] = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(grammar=FAILING, n=2, max_tokens=9),
        BeamSearchParams(grammar=FAILING, max_tokens=9),
        SamplingParams(grammar=later, max_tokens=100, seed=1),
        BeamSearchParams(grammar=later, max_tokens=100),
    ]
    first, *failed = (output for _, output in sorted(llm.as_completed(["x"] * 5, params), key=lambda pair: pair[0]))
    assert first.error is None
    assert len(first.outputs[0].token_ids) == 9
    for output in failed:
        assert output.error is not None
        assert re.match("the grammar failed: (parser|lexer) error: too many", output.error, re.IGNORECASE)
        assert "\n" not in output.error
    again = llm.generate(["x"], SamplingParams(grammar=later, max_tokens=2, seed=1))[0]
    assert again.error is None, "it is compiled anew: the library's bounds hold for all copies of a matcher together"


@pytest.mark.parametrize("cls", [SamplingParams, BeamSearchParams])
def test_bad_words_that_leave_nothing_are_an_error(llm: LLM, cls: Any) -> None:
    words = [[i] for i in range(640) if llm.tokenizer.token_bytes(i)[:1] in (b"y", b"n")]
    params = cls(grammar=Grammar.choice(["yes", "no"]), bad_words=words)
    [(_, output)] = llm.as_completed(["x"], params)
    assert output.error is not None
    assert output.error.startswith("no token is possible any more: together")
    fewer = cls(
        grammar=Grammar.choice(["yes", "no"]),
        bad_words=[w for w in words if llm.tokenizer.token_bytes(w[0])[:1] == b"n"],
    )
    assert llm.generate(["x"], fewer)[0].outputs[0].text == "yes"


@pytest.mark.parametrize("cls", [SamplingParams, BeamSearchParams])
@pytest.mark.parametrize("text", ["hello there, hello world", "naïve 🎉 the then", '{"name": "the"}'])
def test_a_text_that_is_the_only_one_may_be_spelled_with_any_tokens(llm: LLM, cls: Any, text: str) -> None:
    """Four parameters ban the longest tokens of the text. Shorter tokens remain."""
    grammar, ids = Grammar.choice([text]), set(ids_of(llm, text))
    [plain] = llm.generate(["x"], cls(grammar=grammar, max_tokens=60))
    spelled = set(plain.outputs[0].token_ids)
    long = [each for each in sorted(ids | spelled) if len(llm.tokenizer.token_bytes(each)) > 1]
    assert long, "the text has tokens of several bytes"
    single = [each for each in range(640) if len(llm.tokenizer.token_bytes(each)) == 1]
    for bounds in (
        {"bad_words": [[each] for each in long]},
        {"allowed_token_ids": single},
        {"stop_token_ids": long},
        {"no_repeat_ngram_size": 1, "max_tokens": 3},  # a token that comes again is excluded
    ):
        [output] = llm.generate(["x"], cls(**{"grammar": grammar, "max_tokens": 60, **bounds}))
        assert output.error is None, bounds
        assert text.startswith(output.outputs[0].text.rstrip("\ufffd"))  # cut within a character
        if "no_repeat_ngram_size" not in bounds:
            assert output.outputs[0].text == text
            assert not set(output.outputs[0].token_ids) & set(long)


def test_branches_go_on_under_a_grammar_each(llm: LLM) -> None:
    root = llm.branch("hello")
    forks = [root.fork() for _ in range(4)]
    schema = record(n=INTEGER)
    grammars = [Grammar.choice(["red", "green"]), Grammar.regex("[0-9]{5}"), Grammar.json(schema), None]
    params = [SamplingParams(grammar=grammar, max_tokens=120, seed=1) for grammar in grammars]
    first, second, third, _ = llm.sample(forks, params)
    assert first.text in ("red", "green")
    assert re.fullmatch("[0-9]{5}", second.text)
    assert_valid(third.text, schema)
    assert forks[0].text.endswith(f"hello{first.text}")
    forks[0].append(" and ")
    again = forks[0].sample(params[1])
    assert forks[0].text.endswith(f"hello{first.text} and {again.text}")
    for branch in (root, *forks):
        branch.free()


def test_streams_say_what_the_answer_says(llm: LLM) -> None:
    params = SamplingParams(grammar=Grammar.json(SCHEMAS["a record"]), max_tokens=200, seed=5)
    said = "".join(delta.text for delta in llm.stream("x", params))
    assert said == llm.generate(["x"], params)[0].outputs[0].text
    *_, last = llm.stream("x", BeamSearchParams(grammar=Grammar.choice(CHOICES)))
    assert last.text in CHOICES
    assert last.finish_reason == "stop"


# --- beams, against transformers --------------------------------------------------------------------------------------


def of_bytes(directory: Path) -> Tokenizer:
    """A tokenizer without merges: each byte is a token, so a grammar's choice of tokens is its choice of bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from lib.tokens import saved

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|begin_of_text|>", "<|eot_id|>", *alphabet]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.add_special_tokens(names[:2])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer.from_directory(saved(backend, directory, None))


@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_beams_are_those_of_transformers_under_the_same_constraint(tmp_path: Path, width: int) -> None:
    """Transformers is told by a plain function which tokens may follow, and when a text is complete."""
    import torch

    tokenizer = of_bytes(tmp_path)
    theirs = hf_model(seed=3, vocab_size=258, max_position_embeddings=256).to(DEVICE)
    choices = [b"red", b"reddish", b"green", b"greed", b"rest", b"g", b"go on", b"blue and green", b"blue"]
    eos, prompt = 1, [9, 60, 77]

    def text_of(ids: Any) -> bytes:
        return b"".join(tokenizer.token_bytes(i) for i in ids.tolist()[len(prompt) :] if i > eos)

    def may_follow(_: int, ids: Any) -> list[int]:
        text = text_of(ids)
        found = [i for i in range(2, 258) if any(c.startswith(text + tokenizer.token_bytes(i)) for c in choices)]
        return found + [eos] * (text in choices or not found)

    class Complete:
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            done = [
                (t := text_of(ids)) in choices and not any(c != t and c.startswith(t) for c in choices)
                for ids in input_ids
            ]
            return torch.tensor(done, device=input_ids.device)

    from transformers import StoppingCriteria, StoppingCriteriaList

    class Criterion(Complete, StoppingCriteria):
        pass

    result = theirs.generate(
        torch.tensor([prompt], device=DEVICE), num_beams=width, num_return_sequences=width, max_new_tokens=20,
        do_sample=False, eos_token_id=eos, pad_token_id=0, prefix_allowed_tokens_fn=may_follow,
        stopping_criteria=StoppingCriteriaList([Criterion()]), return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    params = BeamSearchParams(grammar=Grammar.choice([c.decode() for c in choices]), beam_width=width, max_tokens=20)
    engine = engine_for(ours(theirs), num_blocks=256, tokenizer=tokenizer, eos=frozenset({eos}))
    [output] = run(engine, [(prompt, params)])
    assert [each.text.encode() for each in output.outputs] == [text_of(ids) for ids in result.sequences]
    scores = [each.score for each in output.outputs]
    assert scores == pytest.approx(result.sequences_scores.tolist(), abs=1e-3)
