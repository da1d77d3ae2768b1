"""Test an answer in progress, without screen and engine: its commands to the engine, and its ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minillm.service.messages import (
    Abort,
    BeamsChanged,
    BeamView,
    Command,
    ContextFull,
    Drop,
    Event,
    Finished,
    Generate,
    Reading,
    RequestFailed,
    Started,
    TextDelta,
)
from minillm.ui.chat import answer_run
from minillm.ui.chat.answer_run import AnswerRun, Ending
from minillm.ui.chat.answer_view import summary
from minillm.ui.chat.conversation import Candidate, Conversation
from minillm.ui.settings import Settings

pytestmark = pytest.mark.anyio


class Paper:
    """A transcript without a screen: it shows no turn, and keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def view_of(self, turn: object) -> None:
        return None

    async def add_note(self, text: str, kind: str = "info") -> None:
        self.notes.append(text)


class Case:
    """Hold a conversation with an answer in progress."""

    def __init__(self, *questions: str, num_candidates: int = 0, max_model_len: int = 10_000, **sampling: Any) -> None:
        self.conversation = Conversation()
        for question in questions[:-1]:
            answer = self.conversation.ask(question)
            answer.text, answer.finish_reason = f"about {question}", "stop"
        self.answer = self.conversation.ask(questions[-1])
        self.answer.candidates = [Candidate() for _ in range(num_candidates)]
        self.paper, self.sent = Paper(), list[Command]()
        turn = self.conversation.leaf
        assert turn is not None
        settings = Settings("m", sampling=sampling, system="be brief")
        self.run = AnswerRun(turn, self.conversation, settings, self.paper, self.sent.append, max_model_len)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        return self.answer.request_id

    @property
    def asked(self) -> list[Generate]:
        return [command for command in self.sent if isinstance(command, Generate)]

    async def take(self, *events: Event) -> Ending | None:
        """The ending that the last of these events brings."""
        for event in events[:-1]:
            assert await self.run.take(event) is None
        return await self.run.take(events[-1])


async def test_an_answer_from_the_question_to_its_end() -> None:
    case = Case("one", "two", temperature=0.5)
    case.run.ask()
    [generate] = case.sent
    assert isinstance(generate, Generate)
    assert [message["content"] for message in generate.messages] == ["be brief", "one", "about one", "two"]
    assert (generate.request_id, generate.conversation) == (case.name, case.conversation.conversation_id)
    assert (generate.params["temperature"], generate.min_context_left, generate.continues) == (0.5, 256, False)
    ending = await case.take(
        Started(case.name, 9, 4, 0.1), TextDelta(case.name, 0, "so ", 1), TextDelta(case.name, 0, "it is", 2),
        Finished(case.name, 0, "length", 3, 7.5, 12),
    )  # fmt: skip
    assert ending == Ending("length")
    assert await case.run.end("length")
    assert (case.answer.text, case.answer.num_output_tokens, case.answer.tokens_per_second) == ("so it is", 3, 7.5)
    assert (case.answer.num_cached_tokens, case.answer.finish_reason) == (4, "length")


async def test_the_rate_of_an_answer_that_goes_on_counts_its_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(answer_run, "time", SimpleNamespace(monotonic=lambda: now))
    case = Case("one")
    case.answer.text, case.answer.num_output_tokens, case.answer.finish_reason = "so it", 30, "abort"
    case.run.go_on()
    await case.take(Started(case.name, 40, 39, 0.1), TextDelta(case.name, 0, " is", 11))
    now = 104.0
    await case.run.draw(0)
    assert case.answer.tokens_per_second == 2.5  # ten more in four seconds


async def test_tokens_that_were_guessed_are_told_at_its_end() -> None:
    case = Case("one")
    case.run.ask()
    await case.take(
        Started(case.name, 9, 0, 0.1), TextDelta(case.name, 0, "so it is", 30),
        Finished(case.name, 0, "stop", 30, 7.5, 39, 12),
    )  # fmt: skip
    await case.run.end("stop")
    assert "30 tokens · 7.5 tok/s · 12 drafted · first token" in summary(case.answer)


@pytest.mark.parametrize(("longest", "max_tokens", "left"), [(10_000, 1000, 256), (800, 1000, 100), (10_000, 3, 3)])
async def test_the_context_that_an_answer_needs(longest: int, max_tokens: int, left: int) -> None:
    case = Case("one", max_model_len=longest, max_tokens=max_tokens)
    case.run.ask()
    assert case.asked[0].min_context_left == left


async def test_a_long_prompt_says_how_far_it_is() -> None:
    case = Case("one")
    case.run.ask()
    assert summary(case.answer) == "reading the prompt …"
    assert await case.take(Reading(case.name, 2048, 4690, 34.2)) is None
    assert summary(case.answer) == "reading the prompt: 2,048 of 4,690 tokens · 34 s left"
    assert (case.answer.num_known_tokens, case.answer.num_prompt_tokens) == (2048, 4690)
    await case.take(Started(case.name, 4690, 0, 60.0))
    assert case.answer.num_known_tokens == 4690


async def test_what_was_stopped_before_its_first_word_was_not_said() -> None:
    case = Case("one")
    case.run.ask()
    case.run.stop()
    assert case.sent[-1] == Abort(case.name)
    assert case.run.is_stopping
    assert await case.take(Finished(case.name, 0, "abort", 0, 0.0, 5)) == Ending("abort")
    assert not await case.run.end("abort")


async def test_an_empty_answer_that_ends_by_itself_is_one() -> None:
    case = Case("one")
    assert await case.run.end("stop")


async def test_a_failure_says_why() -> None:
    case = Case("one")
    assert await case.take(RequestFailed(case.name, "it broke")) == Ending("lost", "it broke")


async def test_the_oldest_turns_go_until_the_question_fits() -> None:
    case = Case("one", "two", "three")
    case.run.ask()
    full = ContextFull(case.name, 990, 1000)
    assert await case.take(full) is None
    assert [message["content"] for message in case.asked[-1].messages] == ["be brief", "three"], "half at once"
    assert await case.take(full) is None
    assert [generate.min_context_left for generate in case.asked] == [256, 256, 1]
    await case.take(Started(case.name, 900, 0, 0.1))
    assert ["oldest 2 turns" in note for note in case.paper.notes] == [True]
    ending = await case.take(ContextFull(case.name, 1200, 1000))
    assert ending is not None
    assert ending.reason == "lost"
    assert "1,200 tokens" in ending.error


async def test_an_answer_goes_on_in_the_place_of_the_first() -> None:
    case = Case("one", n=3)
    case.answer.text, case.answer.finish_reason, before = "so far", "length", case.name
    case.run.go_on()
    [generate] = case.asked
    assert generate.continues
    assert generate.messages[-1] == {"role": "assistant", "content": "so far"}
    assert generate.params["n"] == 1
    assert generate.request_id == case.name != before
    ending = await case.take(ContextFull(case.name, 990, 1000))
    assert ending is not None
    assert "cannot continue" in ending.error
    assert await case.run.end("lost")
    assert case.sent[-1] == Drop(before)


async def test_candidates_end_together() -> None:
    case = Case("one", num_candidates=2)
    ended = [Finished(case.name, index, "stop", 3, 1.0, 9) for index in (1, 0)]
    assert await case.take(TextDelta(case.name, 1, "b", 1), TextDelta(case.name, 0, "a", 1), *ended) == Ending("stop")
    assert [(each.text, each.num_tokens) for each in case.answer.candidates] == [("a", 1), ("b", 1)]
    case = Case("one", num_candidates=2)
    ended = [Finished(case.name, 0, "stop", 3, 1.0, 9), Finished(case.name, 1, "abort", 3, 1.0, 9)]
    assert await case.take(*ended) == Ending("abort")


async def test_a_chosen_beam_is_found_where_it_has_gone() -> None:
    case = Case("one", num_candidates=3)
    assert case.run.chosen is None
    views = [BeamView(text, -0.1, -1.0, 4, False) for text in ("a", "b", "c")]
    await case.take(BeamsChanged(case.name, views))
    assert case.answer.num_output_tokens == 4
    case.run.stop(chosen=1)
    later = [BeamView(text, -0.1, -1.0, 6, True) for text in ("c d", "a d", "b d")]
    await case.take(BeamsChanged(case.name, later))
    assert case.run.chosen == 2
    assert [each.finish_reason for each in case.answer.candidates] == ["stop"] * 3


async def test_each_beam_keeps_the_reason_of_its_end() -> None:
    case = Case("one", num_candidates=2)
    ended = [Finished(case.name, index, "length", 4, 1.0, 8) for index in (0, 1)]
    views = [BeamView(text, -0.1, -1.0, 4, True) for text in ("a", "b")]
    assert await case.take(BeamsChanged(case.name, views), ended[0]) is None
    assert await case.take(ended[1]) == Ending("stop")
    assert [each.finish_reason for each in case.answer.candidates] == ["length", "length"]
