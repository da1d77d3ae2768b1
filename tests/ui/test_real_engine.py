"""The app on a real engine: a small random model for speed, and the default weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.drivers.headless_driver import HeadlessDriver

from lib.terminal import session
from lib.tokens import THINKING
from lib.ui import answered, ask, chat, notes, say, screen, seen, until
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.demo import STOPS, DemoApp, Narration, demo_settings
from minillm.ui.memory.pool import Pool
from minillm.ui.settings import Settings
from minillm.weights.manifest import default_model

pytestmark = pytest.mark.anyio
Command = tuple[str, ...]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


def engine(command: Sequence[str], model: str, **options: Any) -> dict[str, Any]:
    """The app's settings for a real engine on the CPU."""
    return {"model": model, "engine_command": command, "engine": {"device": "cpu", "num_blocks": 120, **options}}


async def test_branches_candidates_and_beams_share_blocks_and_give_them_back(
    engine_command: Command, tiny_model: Path
) -> None:
    async with chat(
        **engine(engine_command, str(tiny_model)), sampling={**GREEDY, "ignore_eos": True}, size=(160, 50)
    ) as pilot:
        first = await ask(pilot, "hello there")
        second = await ask(pilot, "and again")
        assert 0 < second.answer.num_cached_tokens < second.answer.num_prompt_tokens
        await pilot.press("alt+r")
        again = await answered(pilot, second)
        assert again.answer.num_cached_tokens == again.answer.num_prompt_tokens - 1
        assert again.answer.text == second.answer.text

        def pool() -> Pool:
            found = screen(pilot).pool
            assert found is not None
            return found

        await say(pilot, "/n 3")
        chosen = await ask(pilot, "pick one")
        await until(pilot, lambda: [t.state for t in pool().tables_of(chosen.answer.request_id)] == ["idle"] * 3)
        assert pool().figures.shared_blocks > 0
        await until(pilot, lambda: "turn 3 · answer 3" in seen(pilot))
        await pilot.press("3")
        await until(pilot, lambda: len(pool().tables_of(chosen.answer.request_id)) == 1)
        await say(pilot, "/beams 4")
        beams = await ask(pilot, "search")
        assert len(beams.answer.candidates) == 4
        assert all(candidate.logprob is not None for candidate in beams.answer.candidates)
        await pilot.press("1")
        await until(pilot, lambda: len(pool().tables_of(beams.answer.request_id)) == 1)
        assert len(pool().tables_of(first.answer.request_id)) == 1, "earlier turns keep theirs"
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not pool().tables and pool().used_blocks == 0)
        kinds = {entry.kind for entry in pool().log}
        assert {"allocate", "fork", "copy", "free"} <= kinds


async def test_an_engine_that_fails_leaves_the_conversation(engine_command: Command, tiny_model: Path) -> None:
    async with chat(**engine(engine_command, str(tiny_model)), sampling={**GREEDY, "ignore_eos": True}) as pilot:
        await ask(pilot, "hello")
        await say(pilot, "long " * 2000)
        await until(pilot, lambda: any("context holds" in note for note in notes(pilot)))
        assert screen(pilot).chat_pane.run is None
        await ask(pilot, "again")
        pool = screen(pilot).pool
        assert pool is not None
        await until(pilot, lambda: {table.state for table in pool.tables.values()} == {"idle"})


async def test_the_tour_shows_all_that_it_promises(engine_command: Command, tiny_model: Path, tmp_path: Path) -> None:
    settings = demo_settings(Settings(str(tiny_model), engine={"device": "cpu", "speculate": "lookup"}))
    assert settings.engine["speculate"] == "off", "draft tokens would free the blocks of one answer too early"
    app = DemoApp(
        settings, SessionStore(tmp_path), speed=100.0, engine_command=engine_command, driver_class=HeadlessDriver
    )
    async with app.run_test(size=(150, 44)) as pilot:
        await until(pilot, lambda: app.number >= 1, 60)
        await pilot.press("p")
        assert app.paused
        await pilot.press("space")
        assert not app.paused
        speed = app.speed
        await pilot.press("minus")
        assert app.speed < speed
        await pilot.press(*["plus"] * 6)
        app.speed = 100.0
        app._set_pace()
        await until(pilot, lambda: app.over, 120)
        assert app.number == len(STOPS)
        assert app.missed == []
        assert "The tour is over" in str(app.chat.query_one(Narration).render())
        pool = app.chat.pool
        assert pool is not None
        counts = pool.counts
        assert counts.num_copies
        assert counts.num_hit_tokens
        assert counts.num_evictions
        assert counts.num_preemptions
        assert counts.num_swapped_in
        await pilot.press("p")
        await until(pilot, lambda: app.chat.query_one("PromptInput").text == "p")


@pytest.mark.weights
async def test_the_default_model_answers(engine_command: Command, tmp_path: Path) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 40}
    async with chat(
        **engine(engine_command, default_model()),
        sampling=sampling,
        system="You are a helpful assistant.",
        size=(160, 50),
    ) as pilot:
        pool = screen(pilot).pool
        assert pool is not None
        await until(pilot, lambda: pool.figures.pinned_blocks > 0)
        turn = await ask(pilot, "What is the capital of France?")
        assert "Paris" in turn.answer.text
        assert turn.answer.num_cached_tokens > 0, "the system prompt was computed when it was pinned"
        assert len(turn.answer.tokens) == turn.answer.num_output_tokens
        await say(pilot, "/set temperature 0.9")
        await say(pilot, "/set seed 3")
        await say(pilot, "/n 3")
        chosen = await ask(pilot, "Name an animal.", 120)
        assert len({candidate.text for candidate in chosen.answer.candidates}) > 1
        await pilot.press("2")
        await until(pilot, lambda: chosen.answer.text != "")
        follow = await ask(pilot, "Why that one?", 120)
        assert follow.answer.num_cached_tokens > 0.5 * follow.answer.num_prompt_tokens


@pytest.mark.parametrize(
    "model", ["tiny", pytest.param("default", marks=[pytest.mark.soak, pytest.mark.weights])]
)  # with the default model it computes for half a minute
def test_the_demo_shows_all_eight_steps(model: str, tiny_model: Path) -> None:
    """Run it as users do."""
    options = ("--model", str(tiny_model), "--speed", "100") if model == "tiny" else ("--speed", "10")
    command = (sys.executable, "-m", "minillm", "demo", *options)
    with session(command, size=(160, 50), environment={"COLORFGBG": "15;0"}) as running:
        running.wait_for("The tour is over", 400)
        shown = running.output.decode()
        running.type("\x11")
        assert running.end() == 0
    for number in range(1, len(STOPS) + 1):
        assert f"{number}/8" in shown
    assert "Not shown this time" not in shown
    assert "did not happen" not in shown


async def test_the_demo_says_which_step_it_missed(engine_command: Command, tiny_model: Path, tmp_path: Path) -> None:
    settings = demo_settings(Settings(str(tiny_model), engine={"device": "cpu"}))
    settings = replace(settings, engine={**settings.engine, "num_blocks": 1_000})
    app = DemoApp(
        settings, SessionStore(tmp_path), speed=100.0, engine_command=engine_command, driver_class=HeadlessDriver
    )
    async with app.run_test(size=(150, 44)) as pilot:
        await until(pilot, lambda: app.over, 120)
        assert app.missed == ["eviction", "preemption"]
        assert "Not shown this time: eviction, preemption." in str(app.chat.query_one(Narration).render())


async def test_answers_at_several_depths_share_their_thought(engine_command: Command, tiny_model: Path) -> None:
    """The template opens the thought, and the model may not end it by itself."""
    template = tiny_model.parent / "thinking.jinja"
    template.write_text(THINKING, encoding="utf-8")
    options = engine(engine_command, str(tiny_model), chat_template=str(template))
    sampling = {**GREEDY, "max_tokens": 60, "ignore_eos": True, "bad_words": ["</think>"]}
    async with chat(**options, sampling=sampling, size=(160, 50)) as pilot:
        await say(pilot, "/depths 20,40,80")
        turn = await ask(pilot, "why?")
        first, second, deepest = turn.answer.candidates
        assert turn.answer.in_reasoning
        assert [each.num_shared for each in (first, second, deepest)] == [20, 40, 0]
        assert [each.num_tokens for each in (first, second, deepest)] == [140] * 3
        assert all("</think>" in each.text for each in (first, second, deepest))

        def tables() -> list[list[int]]:
            found = screen(pilot).pool
            assert found is not None
            return [table.blocks for table in found.tables_of(turn.answer.request_id) if table.state == "idle"]

        await until(pilot, lambda: len(tables()) == 3)
        one, two, three = tables()
        prompt = turn.answer.num_prompt_tokens
        assert one[: (prompt + 19) // 16] == three[: (prompt + 19) // 16]
        assert two[: (prompt + 39) // 16] == three[: (prompt + 39) // 16]
        await say(pilot, "/accept 1")
        await until(pilot, lambda: len(tables()) == 1)
        await say(pilot, "/depths off")
        await say(pilot, "/think 12")
        limited = await ask(pilot, "and now?")
        assert limited.answer.text.count("Enough thinking") == 1
