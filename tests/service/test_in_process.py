"""Test conversations on an engine in this process: shared, pinned and freed blocks, in a pool that is almost full."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.engine import step
from lib.tokens import THINKING
from minillm.config import EngineConfig
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.loading.engine import load_engine
from minillm.service.conversations import Conversations
from minillm.service.messages import (
    FILES,
    Abort,
    BeamsChanged,
    Command,
    ContextFull,
    Drop,
    Event,
    Finished,
    Forget,
    Generate,
    Pin,
    Report,
    Started,
    TextDelta,
    decode_event,
    encode,
)

PARAMS = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
FILE = [{"role": "user", "content": "hello " * 4}]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = load_engine(
        str(tiny_model), EngineConfig(device="cpu", num_blocks=24, max_num_seqs=8, max_num_batched_tokens=32)
    )
    yield engine
    assert not engine.cache.tables, "blocks are left"


class Client:
    """Conversations and their events. Each event has been through the pipe."""

    def __init__(self, engine: Engine, salt: str | None = None) -> None:
        self.events: list[Event] = []
        self.conversations = Conversations(Driver(engine), self._note, salt=salt)

    def _note(self, event: Event) -> None:
        self.events.append(decode_event(encode(event)))

    def do(self, *commands: Command) -> None:
        """Carry out commands, and compute until nothing is under way."""
        for command in commands:
            self.conversations.handle(command)
        while not self.conversations.is_idle:
            step(self.conversations)

    def close(self) -> None:
        self.conversations.close()
        self.do()

    def last(self, kind: type[Event]) -> Event:
        return [event for event in self.events if isinstance(event, kind)][-1]

    @property
    def has_file(self) -> bool:
        return any(owner.request_id == FILES for owner in self.conversations.own().values())


def test_computed_tokens_are_shared_within_a_salt_alone(engine: Engine) -> None:
    cached = []
    for salt in ("a", "b", "a", None, None):
        client = Client(engine, salt)
        client.do(Generate("r", "c", FILE, PARAMS))
        started = client.last(Started)
        assert isinstance(started, Started)
        cached.append(started.num_cached_tokens > 0)
        assert started.num_disk_tokens == 0
        client.close()
    assert cached == [False, False, True, False, True]


def test_a_file_stays_pinned_as_long_as_the_answer_has_its_context(engine: Engine) -> None:
    client = Client(engine)
    client.do(Generate("a", "c", FILE, PARAMS, num_pinned=1))
    assert client.has_file
    client.do(Generate("b", "c", FILE, {**PARAMS, "max_tokens": 10_000}, num_pinned=1))
    longest = client.last(Finished)
    assert isinstance(longest, Finished)
    for left, stays in ((longest.num_output_tokens, True), (longest.num_output_tokens + 1, False)):
        client.conversations.handle(Generate(f"c{left}", "c", FILE, PARAMS, min_context_left=left))
        assert client.has_file == stays
        client.do()
    client.close()


def test_a_question_leaves_at_least_one_token_to_the_answer(engine: Engine) -> None:
    assert engine.tokenizer is not None
    most, longest = engine.max_model_len, [{"role": "user", "content": ""}]
    while (length := len(engine.tokenizer.apply_chat_template(longest))) < most - 1:
        longest[0]["content"] += "q"
    assert length == most - 1
    client = Client(engine)
    client.do(Generate("a", "c", [{"role": "user", "content": longest[0]["content"] + "q"}], PARAMS))
    assert client.events[-1] == ContextFull("a", most, most)
    client.do(Generate("b", "c", longest, PARAMS))
    finished = client.last(Finished)
    assert isinstance(finished, Finished)
    assert finished.num_output_tokens == 1
    client.close()


def test_an_answer_stopped_before_its_first_token_has_no_rate(engine: Engine) -> None:
    client = Client(engine)
    for params in (PARAMS, {"beam_width": 2, "max_tokens": 3}):
        client.do(Generate("a", "c", FILE, params), Abort("a"))
        finished = client.last(Finished)
        assert isinstance(finished, Finished)
        assert (finished.finish_reason, finished.num_output_tokens, finished.tokens_per_second) == ("abort", 0, 0.0)
    client.close()


@pytest.mark.parametrize(("seconds", "fewest", "most"), [(0.0, 6, 6), (3600.0, 1, 2)])
def test_texts_are_sent_as_often_as_was_asked_and_before_the_end(
    seconds: float, fewest: int, most: int, engine: Engine
) -> None:
    client = Client(engine)
    client.do(Report(seconds), Generate("a", "c", FILE, {**PARAMS, "max_tokens": 6}))
    texts = [event for event in client.events if isinstance(event, TextDelta)]
    assert sum(event.num_tokens for event in texts) == 6
    assert fewest <= len(texts) <= most
    assert isinstance(client.events[-1], Finished)
    assert sum(isinstance(event, Started) for event in client.events) == 1
    text = "".join(event.text for event in texts)
    client.conversations.handle(Generate("b", "d", FILE, {**PARAMS, "max_tokens": 6, "stop": [f"{text}..."]}))
    for _ in range(4):
        step(client.conversations)
    client.do(Abort("b"))
    held = "".join(event.text for event in client.events if isinstance(event, TextDelta) and event.request_id == "b")
    assert held, "an abort sends the text that was held back"
    assert text.startswith(held)
    client.close()


def test_an_answer_that_is_dropped_while_it_is_given_leaves_no_blocks(engine: Engine) -> None:
    client = Client(engine)
    client.conversations.handle(Generate("a", "c", FILE, {**PARAMS, "max_tokens": 60}))
    while not any(isinstance(event, TextDelta) for event in client.events):
        step(client.conversations)
    client.do(Drop("a"))
    assert not engine.cache.tables
    assert not client.conversations.kept
    client.close()


def test_nothing_is_pinned_unasked(engine: Engine) -> None:
    client = Client(engine)
    said = [{"role": role, "content": "hi"} for role in ("system", "user", "assistant", "user")]
    for num_pinned, command in (
        (3, Generate("a", "c", said, PARAMS, num_pinned=3)),
        (0, Generate("b", "d", said, PARAMS)),
    ):
        client.do(command)
        assert client.has_file == bool(num_pinned)
        client.do(Forget("c"))
    client.close()


def test_beams_end_for_their_own_reason(engine: Engine) -> None:
    client = Client(engine)
    client.do(Generate("a", "c", FILE, {"beam_width": 3, "max_tokens": 4, "ignore_eos": True}))
    reasons = [event.finish_reason for event in client.events if isinstance(event, Finished)]
    assert reasons == ["length"] * 3
    told = client.last(BeamsChanged)
    assert isinstance(told, BeamsChanged)
    assert all(beam.logprob < 0 for beam in told.beams)
    assert [beam.logprob for beam in told.beams] == pytest.approx([each.score * each.num_tokens for each in told.beams])
    client.close()


@pytest.mark.parametrize("num_steps", range(5))
def test_a_system_prompt_that_is_being_pinned_is_freed_at_the_end(num_steps: int, engine: Engine) -> None:
    client = Client(engine)
    client.conversations.handle(Pin("you are brief " * 9))
    for _ in range(num_steps):
        step(client.conversations)
    client.close()


@pytest.mark.parametrize("last", ["", "you are brief " * 2])
def test_only_the_last_system_prompt_is_pinned(last: str, engine: Engine) -> None:
    client, pinned = Client(engine), engine.scheduler.idle.pinned
    client.do(Pin("hello " * 4), Pin(last))
    texts = [engine.tokenizer.decode(each.token_ids) for each in pinned.values() if engine.tokenizer is not None]
    assert [last in text for text in texts] == [True] * bool(last)
    assert engine.scheduler.idle.idle == {}
    client.close()


def test_a_template_is_told_whether_to_think(tiny_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model, tmp_path / "thinking")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    template = "{% if enable_thinking is defined and not enable_thinking %}/no_think{% endif %}" + THINKING
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    client = Client(load_engine(str(directory), EngineConfig(device="cpu", num_blocks=24)))
    lengths = {}
    for thinks in (None, True, False):
        client.do(Generate(f"{thinks}", "c", FILE, PARAMS, thinks=thinks, num_pinned=1))
        assert client.has_file
        started = client.last(Started)
        assert isinstance(started, Started)
        lengths[thinks] = started.num_prompt_tokens
    assert lengths[None] == lengths[True] < lengths[False], "the template closes the thoughts of a model that has none"
