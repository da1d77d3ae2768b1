"""Beam search against Hugging Face ``generate`` on the same weights: the same sequences, the same scores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lib.beams import CASES, EOS, assert_same, beam_models, expected, prompts
from lib.engine import engine_for, run
from lib.models import DEVICE
from minillm.errors import UsageError
from minillm.params import BeamSearchParams, SamplingParams
from minillm.text.stop import StreamingDetokenizer


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return beam_models()


@pytest.mark.parametrize("eos", [[EOS], [EOS, 11, 40], []], ids=["one eos", "three eos", "no eos"])
def test_the_same_beams_and_scores_as_transformers(models: tuple[Any, Any], eos: list[int]) -> None:
    """Run all cases in one batch, together with other requests."""
    theirs, model = models
    requests: list[tuple[list[int], Any]] = []
    for number, (params, prompt) in enumerate(zip(CASES, prompts(len(CASES)), strict=True)):
        requests.append((prompt, params))
        if number % 3 == 0:
            requests.append((prompt[::-1], SamplingParams(n=2, seed=number, max_tokens=10)))
    engine = engine_for(model, num_blocks=512, eos=frozenset(eos), max_num_seqs=128, max_num_batched_tokens=128)
    outputs = run(engine, requests)
    for (prompt, params), output in zip(requests, outputs, strict=True):
        if isinstance(params, BeamSearchParams):
            assert_same(output, *expected(theirs, prompt, params, eos))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_survive_preemption(models: tuple[Any, Any], preemption: str, block_size: int) -> None:
    theirs, model = models
    params = BeamSearchParams(beam_width=4, max_tokens=24, ignore_eos=True)
    requests = [(prompt, params) for prompt in prompts(5, longest=30)]
    engine = engine_for(
        model,
        num_blocks={1: 150, 4: 40, 16: 15}[block_size],
        block_size=block_size,
        host_blocks=400 // block_size if preemption == "swap" else 0,
        admission="optimistic",
    )
    outputs = run(engine, requests)
    assert engine.scheduler.preemption.count > 0
    assert (engine.scheduler.preemption.swap.num_swapped_in > 0) == (preemption == "swap")
    for (prompt, _), output in zip(requests, outputs, strict=True):
        assert_same(output, *expected(theirs, prompt, params, []))


def test_one_beam_is_greedy(models: tuple[Any, Any]) -> None:
    _, model = models
    engine = engine_for(model)
    beam = BeamSearchParams(beam_width=1, max_tokens=10, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    one, other = run(engine, [([4, 5, 6], beam), ([4, 5, 6], greedy)])
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_beams_share_the_prompt_and_copy_on_write(models: tuple[Any, Any]) -> None:
    _, model = models
    engine = engine_for(model, block_size=4, num_blocks=64)
    engine.add_request("0", list(range(3, 25)), BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True))
    engine.step()
    engine.step()
    beams = engine.requests.groups["0"].sequences
    assert len({tuple(beam.table.blocks[:5]) for beam in beams if beam.table}) == 1, "five full blocks are shared"
    assert engine.cache.num_copies == 3, "the partly filled block was copied for three beams, the last wrote in place"
    engine.abort("0")
    engine.step()
    output = engine.take_finished()[0]
    assert len(output.outputs) == 4
    assert all(completion.finish_reason == "abort" for completion in output.outputs)
    assert engine.cache.num_free == 64


def test_logprobs_of_beams_add_up(models: tuple[Any, Any]) -> None:
    _, model = models
    params = BeamSearchParams(beam_width=4, max_tokens=8, logprobs=3, length_penalty=2.0)
    engine = engine_for(model, eos=frozenset([EOS]))
    for completion in run(engine, [([5, 6, 7], params)])[0].outputs:
        assert completion.logprobs is not None
        assert completion.cumulative_logprob is not None
        assert [token.token_id for token in completion.logprobs] == completion.token_ids
        assert all(len(token.top) == 3 for token in completion.logprobs)
        total = sum(token.logprob for token in completion.logprobs)
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert completion.score == pytest.approx(total / len(completion.token_ids) ** 2, abs=1e-3)


def test_an_aborted_search_scores_its_beams_by_their_length(models: tuple[Any, Any]) -> None:
    _, model = models
    engine = engine_for(model)
    params = BeamSearchParams(beam_width=3, max_tokens=9, length_penalty=2.0, ignore_eos=True)
    engine.add_request("0", [5, 6, 7], params)
    for _ in range(4):
        engine.step()
    engine.abort("0")
    engine.carry_out_aborts()
    [output] = engine.take_finished()
    for completion in output.outputs:
        assert len(completion.token_ids) == 4
        assert completion.cumulative_logprob is not None
        assert completion.score == pytest.approx(completion.cumulative_logprob / 4**2)


def diverse_reference(
    theirs: Any, prompt: list[int], params: BeamSearchParams, eos: list[int]
) -> list[tuple[list[int], float]]:
    """Search by groups in float64, as the paper and transformers 4.49: groups one after another at each step.

    The diversity penalty comes before the repetition penalty. A group that is done chooses nothing.
    """
    model, width = theirs.double(), params.beam_width // params.num_beam_groups
    groups: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(params.num_beam_groups)]
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in groups]
    for length in range(1, params.max_tokens + 1):
        counts: Counter[int] = Counter()
        for number, beams in enumerate(groups):
            everything = []
            for score, tokens in beams:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + tokens], device=DEVICE)).logits[0, -1]
                values = logits.log_softmax(-1).tolist()
                for token, count in counts.items():
                    values[token] -= params.diversity_penalty * count
                for token in {*prompt, *tokens}:
                    values[token] *= params.repetition_penalty ** (1 if values[token] < 0 else -1)
                everything += [(score + value, [*tokens, token]) for token, value in enumerate(values)]
            everything.sort(key=lambda beam: -beam[0])
            ended = [beam for beam in everything[:width] if beam[1][-1] in eos]
            groups[number] = running = [beam for beam in everything if beam[1][-1] not in eos][: width if beams else 0]
            counts.update(tokens[-1] for _, tokens in running)
            last = running if length == params.max_tokens else []
            kept = [(score / length**params.length_penalty, tokens) for score, tokens in ended + last]
            finished[number] = kept = sorted(finished[number] + kept, key=lambda beam: -beam[0])[:width]
            full = running and len(kept) == width
            if full and (params.early_stopping or running[0][0] / length**params.length_penalty <= kept[-1][0]):
                groups[number] = []
    theirs.float()
    return sorted([(t, s) for group in finished for s, t in group], key=lambda beam: -beam[1])


@pytest.mark.parametrize(("width", "groups", "penalty"), [(4, 2, 1.0), (6, 3, 0.5), (4, 4, 5.0), (4, 2, 0.0)])
def test_diverse_groups_match_a_plain_reference(
    models: tuple[Any, Any], width: int, groups: int, penalty: float
) -> None:
    theirs, model = models
    params = BeamSearchParams(
        beam_width=width, num_beam_groups=groups, diversity_penalty=penalty, max_tokens=5, ignore_eos=True
    )
    output = run(engine_for(model), [([9, 8, 7, 6], params)])[0]
    reference = diverse_reference(theirs, [9, 8, 7, 6], params, [])
    assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _ in reference]
    assert [completion.score for completion in output.outputs] == pytest.approx([s for _, s in reference], abs=1e-3)


def ending(length_penalty: float, early_stopping: bool, **options: Any) -> BeamSearchParams:
    return BeamSearchParams(max_tokens=9, length_penalty=length_penalty, early_stopping=early_stopping, **options)


@pytest.mark.parametrize(
    "params",
    [
        ending(1.0, True, beam_width=4, num_beam_groups=2, diversity_penalty=1.0),
        ending(0.5, False, beam_width=6, num_beam_groups=3, diversity_penalty=0.5),
        ending(0.0, True, beam_width=4, num_beam_groups=4, diversity_penalty=2.0),
        ending(0.0, True, beam_width=4, num_beam_groups=2, diversity_penalty=0.5, repetition_penalty=1.4),
        ending(1.0, True, beam_width=6, num_beam_groups=3, diversity_penalty=0.5, repetition_penalty=0.7),
    ],
)
def test_groups_that_end_one_after_another_match_a_plain_reference(
    models: tuple[Any, Any], params: BeamSearchParams
) -> None:
    """Run diverse searches in one batch, together with a sampling request."""
    theirs, model = models
    eos = [EOS, 11, 40, 26, 82, 86]
    engine = engine_for(model, num_blocks=512, eos=frozenset(eos), max_num_seqs=64)
    searched = prompts(6, longest=8)
    lengths = spy_on_groups(engine)
    outputs = run(engine, [*((prompt, params) for prompt in searched), ([3, 4], SamplingParams(seed=1))])
    for prompt, output in zip(searched, outputs, strict=False):
        reference = diverse_reference(theirs, prompt, params, eos)
        assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _ in reference]
        assert [completion.score for completion in output.outputs] == pytest.approx([s for _, s in reference], abs=1e-3)
    assert any(0 in each and any(each) for each in lengths), "no group has ended before another"


def spy_on_groups(engine: Any) -> list[list[int]]:
    """Return a list that gets the number of beams in each group at each step of each search."""
    beams, lengths = engine._methods[BeamSearchParams], []
    advance = beams.advance

    def noting(step: Any, *rest: Any) -> Any:
        lengths.append([len(each) for each in step.beams])
        return advance(step, *rest)

    beams.advance = noting
    return lengths


def test_a_group_does_not_pay_for_beams_that_a_stop_string_has_ended(models: tuple[Any, Any]) -> None:
    """A stop string of one token's text ends a search as that token would if it were an end token."""
    theirs, model = models
    table = [chr(256 + token).encode() for token in range(97)]
    no_tags: dict[str, Any] = {"encode": lambda text, **_: list(text.encode()), "chat_template": ""}
    tokenizer = SimpleNamespace(detokenizer=partial(StreamingDetokenizer, table), **no_tags)
    params = ending(1.0, True, beam_width=6, num_beam_groups=3, diversity_penalty=0.7)
    for prompt in prompts(4, longest=8):
        engine = engine_for(model, num_blocks=256, tokenizer=cast(Any, tokenizer))
        [first] = run(engine, [(prompt, replace(params, max_tokens=1))])
        best = first.outputs[0].token_ids[0]
        [output] = run(engine, [(prompt, replace(params, stop=[chr(256 + best)]))])
        reference = diverse_reference(theirs, prompt, params, [best])
        assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _ in reference]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 4, "n": 5}, "n must"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"beam_width": 4, "num_beam_groups": 3}, "num_beam_groups"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 41}, "length_penalty"),  # the power of a long beam's length would overflow
        ({"length_penalty": -41}, "length_penalty"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
def test_wrong_parameters_are_named(values: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        BeamSearchParams(**values)
