"""The text of a completion: stop strings are found wherever tokens cut them, by one rule for samples and beams."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.examples import examples
from minillm.llm import LLM
from minillm.params import BeamSearchParams, SamplingParams
from minillm.text.stop import OutputText, StreamingDetokenizer


def ending(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[int, str, str] | None:
    """The rule, said plainly: (tokens, text, stop string) of the completion that these pieces of text make.

    The first stop string to be complete after the first ``min_tokens`` tokens ends it; if two are complete at the same
    character, the longer one does.
    """
    whole = "".join(pieces)
    immune = len("".join(pieces[:min_tokens]))
    for end in range(immune + 1, len(whole) + 1):
        complete = [stop for stop in stops if whole[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            tokens = next(n for n in range(len(pieces) + 1) if len("".join(pieces[:n])) >= end)
            return tokens, whole[: end - len(stop)], stop
    return None


PIECES = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=12)


@settings(max_examples=examples(400), deadline=None)
@given(pieces=PIECES, stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), least=st.integers(0, 8))
def test_stop_strings_end_text_by_the_rule(pieces: list[str], stops: list[str], least: int) -> None:
    text = OutputText(StreamingDetokenizer([piece.encode() for piece in pieces]), stops, least)
    shown, used = "", 0
    for number in range(len(pieces)):
        shown += text.push(number)
        used = number + 1
        fork = text.copy()  # nothing that happens to a copy happens to the original
        fork.push(0)
        fork.finish()
        if text.matched is not None:
            break
    shown += text.finish()
    expected = ending(pieces, stops, least)
    if expected is None:
        assert (text.matched, shown, used) == (None, "".join(pieces), len(pieces))
    else:
        assert (used, shown, text.matched) == expected
    assert text.text == shown


@settings(max_examples=examples(200), deadline=None)
@given(pieces=PIECES, stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_text_is_shown_that_a_stop_string_takes_back(pieces: list[str], stops: list[str]) -> None:
    text = OutputText(StreamingDetokenizer([piece.encode() for piece in pieces]), stops)
    expected = ending(pieces, stops, 0)
    limit = "".join(pieces) if expected is None else expected[1]
    for number in range(len(pieces)):
        text.push(number)
        assert limit.startswith(text.text)


def test_a_character_that_several_tokens_spell_comes_out_whole_in_every_copy() -> None:
    data = "é🙂".encode()
    text = OutputText(StreamingDetokenizer([bytes([byte]) for byte in data]), ["🙂!"])
    for number in range(4):
        text.push(number)
    fork = text.copy()
    assert [fork.push(number) for number in range(4, len(data))][-1] == ""  # held: it may begin the stop string
    assert fork.finish() == "🙂"
    assert text.text == "é"


def test_a_prompt_may_end_within_a_character() -> None:
    data = "xé🙂!".encode()
    table = [bytes([byte]) for byte in data]
    for cut in range(4, 7):
        text = OutputText(StreamingDetokenizer(table, range(cut)))
        assert "".join(map(text.push, range(cut, len(data)))) + text.finish() == "🙂!"


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), device="cpu", block_size=4, num_blocks=256)


def pieces_of(llm: LLM, prompt: list[int], token_ids: list[int]) -> list[str]:
    """The text that each token adds."""
    stream = llm.tokenizer.detokenizer(prompt)
    pieces = [stream.push(token_id) for token_id in token_ids]
    return [*pieces[:-1], pieces[-1] + stream.finish()]


def check(llm: LLM, output: Any, params: Any) -> bool:
    """Compare each completion with the rule; True where a stop string has ended one."""
    found = False
    for completion in output.outputs:
        pieces = pieces_of(llm, output.prompt_token_ids, completion.token_ids)
        expected = ending(pieces, list(params.stop), params.min_tokens)
        if expected is None:
            assert completion.finish_reason == "length"
            assert (completion.text, completion.stop_reason) == ("".join(pieces), None)
        else:
            assert expected == (len(completion.token_ids), completion.text, completion.stop_reason)
            assert completion.finish_reason == "stop"
            found = True
    return found


@pytest.mark.parametrize("beams", [False, True])
def test_samples_and_beams_end_by_the_rule(llm: LLM, beams: bool) -> None:
    """Stop strings have one or two characters, and one token may hold two; ends come before and after min_tokens."""
    rng = random.Random(8)
    prompts = [f"hello {number}" for number in range(15)]
    shape: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    first: list[Any] = [
        BeamSearchParams(beam_width=3, **shape) if beams else SamplingParams(seed=number, **shape)
        for number in range(15)
    ]
    every: list[dict[str, Any]] = []
    for output in llm.generate(prompts, first):
        places = [rng.randrange(len(output.text) - 2) for _ in range(2)]
        stops = [output.text[at : at + rng.randint(1, 2)] for at in places]
        every.append({"stop": stops, "min_tokens": rng.choice((0, 0, 3, 9)), "max_tokens": 16, "ignore_eos": True})
        if beams:
            every[-1] |= {"beam_width": 3, "early_stopping": rng.choice((True, False))}
    params: list[Any] = [
        BeamSearchParams(**each) if beams else SamplingParams(n=2, seed=number, **each)
        for number, each in enumerate(every)
    ]
    seen = 0
    for number, output in enumerate(llm.generate(prompts, params)):
        seen += check(llm, output, params[number])
        alone = params[number] if beams else SamplingParams(seed=number, **every[number])
        last = list(llm.stream(prompts[number], alone))
        best = output.outputs[0]
        assert (last[-1].finish_reason, last[-1].stop_reason) == (best.finish_reason, best.stop_reason)
        assert (last[-1].text if beams else "".join(delta.text for delta in last)) == best.text
    assert seen > 6
