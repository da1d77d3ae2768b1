"""The engine's process, as the app drives it: a real worker on a small random model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import pytest
from msgspec.structs import astuple

from lib.engine import step
from minillm.cache.runs import common_length
from minillm.config import EngineConfig
from minillm.engine.driver import Driver
from minillm.loading.engine import load_engine
from minillm.outputs import StepReport
from minillm.progress import Progress
from minillm.service.client import CommandClient
from minillm.service.conversations import Conversations
from minillm.service.messages import (
    FILES,
    Abort,
    BeamsChanged,
    BlockFacts,
    CacheChanged,
    CacheCounts,
    Command,
    ContextFull,
    Drop,
    Event,
    Finished,
    Forget,
    Generate,
    Inspect,
    Keep,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    LogEntry,
    MemoryUse,
    Notice,
    Pace,
    Pin,
    Reading,
    Report,
    RequestFailed,
    Started,
    Stepped,
    TableView,
    TextDelta,
    TokenChoice,
    decode_command,
    decode_event,
    encode,
)
from minillm.service.reporting import by_score
from minillm.ui.memory.pool import BlockState, Pool

Wanted = TypeVar("Wanted", bound=Event)
pytestmark = pytest.mark.anyio
OWNED, CACHED = BlockState.OWNED, BlockState.CACHED
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


class Engine:
    """The process, and every event that it has sent."""

    def __init__(self, client: CommandClient) -> None:
        self.client = client
        self.events: list[Event] = []

    async def listen(self) -> None:
        async for event in self.client.events():
            self.events.append(event)

    async def wait_for(self, kind: type[Event], count: int = 1) -> Event:
        """Wait for the ``count``-th event of this kind."""
        with anyio.fail_after(60):
            while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
                await asyncio.sleep(0.01)
        return found[count - 1]

    async def pool(self, condition: Callable[[Pool], object]) -> Pool:
        """Return the pool that all pictures together give, once it meets the condition."""
        with anyio.fail_after(60):
            while True:
                pool = Pool(32, 16, 1024)
                for event in self.events:
                    if isinstance(event, CacheChanged):
                        pool.apply(event)
                if condition(pool):
                    return pool
                await asyncio.sleep(0.01)

    async def find(self, kind: type[Wanted], condition: Callable[[Wanted], object] = lambda _: True) -> Wanted:
        """Wait for the first event of a kind that meets a condition."""
        with anyio.fail_after(60):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and condition(event):
                        return event
                await asyncio.sleep(0.01)

    def send(self, command: Command) -> None:
        self.client.send(command)


Running = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture
def engine(engine_command: tuple[str, ...]) -> Running:
    return partial(running_engine, engine_command)


@asynccontextmanager
async def running_engine(command: Sequence[str], model: str, **options: object) -> AsyncIterator[Engine]:
    client = CommandClient(command)
    await client.connect()
    running = Engine(client)
    listening = asyncio.create_task(running.listen())
    running.send(Load(model, {"device": "cpu", "num_blocks": 32, **options}))
    try:
        yield running
    finally:
        await client.process.stop()
        await listening


def question(request: str, text: str, conversation: str = "c", **params: object) -> Generate:
    return Generate(request, conversation, [{"role": "user", "content": text}], {**GREEDY, **params})


async def test_a_conversation_keeps_its_blocks_and_the_next_turn_reuses_them(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        loaded = await running.wait_for(Loaded)
        assert isinstance(loaded, Loaded)
        assert (loaded.num_blocks, loaded.block_size, loaded.device) == (32, 16, "cpu")
        assert loaded.has_chat_template
        assert any(isinstance(event, Loading) and event.progress.label == "loading weights" for event in running.events)
        running.send(question("a", "hello"))
        first = await running.wait_for(Finished)
        assert isinstance(first, Finished)
        assert (first.num_output_tokens, first.finish_reason) == (12, "length")
        text = "".join(event.text for event in running.events if isinstance(event, TextDelta))
        use = await running.find(MemoryUse)
        assert 0 < use.weights + use.cache + use.rest < use.total >= use.free > 0
        idle = await running.pool(lambda pool: [table.state for table in pool.tables.values()] == ["idle"])
        assert idle.tables_of("a")[0].num_tokens == first.num_context_tokens - 1
        messages = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "again"},
        ]
        running.send(Generate("b", "c", messages, GREEDY))
        started = await running.wait_for(Started, 2)
        assert isinstance(started, Started)
        assert started.num_cached_tokens > 0
        assert started.num_cached_tokens < started.num_prompt_tokens
        await running.wait_for(Finished, 2)
        # The first answer's blocks are still there: a branch may begin at it.
        await running.pool(lambda pool: len(pool.tables_of("a")) == len(pool.tables_of("b")) == 1)
        running.send(Forget("c"))
        await running.pool(lambda pool: not pool.tables and pool.figures.used_slots == 0)


async def test_texts_are_told_no_more_often_than_was_asked(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        await running.wait_for(Loaded)
        running.send(question("a", "hello", max_tokens=40, logprobs=2))
        await running.wait_for(Finished)
        at_once = [event for event in running.events if isinstance(event, TextDelta)]
        running.send(Report(3600))
        running.send(question("b", "hello", "d", max_tokens=40, logprobs=2))
        await running.wait_for(Finished, 2)
        later = [event for event in running.events if isinstance(event, TextDelta) and event.request_id == "b"]
        assert len(at_once) > 10
        assert len(later) <= 2
        assert "".join(event.text for event in later) == "".join(event.text for event in at_once)
        assert sum(event.num_tokens for event in later) == 40
        chosen = [[token.text for event in events for token in event.tokens] for events in (at_once, later)]
        assert chosen[0] == chosen[1]
        kinds = [type(event) for event in running.events]
        assert kinds.index(Finished) < kinds.index(TextDelta, kinds.index(Finished))
        assert kinds[::-1].index(Finished) < kinds[::-1].index(TextDelta)  # the end comes behind the last word


async def test_an_answer_can_be_stopped_and_forgotten(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        await running.wait_for(Loaded)
        running.send(Pace(20))  # otherwise the answer may have ended before it is stopped
        running.send(question("a", "hello", max_tokens=400))
        await running.wait_for(TextDelta)
        running.send(Abort("a"))
        finished = await running.wait_for(Finished)
        assert isinstance(finished, Finished)
        assert finished.finish_reason == "abort"
        running.send(question("b", "hello", "d", max_tokens=400))
        await running.wait_for(Started, 2)
        running.send(Forget("d"))
        running.send(Forget("c"))
        await running.pool(lambda pool: pool.num_logged and not pool.tables and pool.used_blocks == 0)


async def test_bad_requests_fail_alone(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        await running.wait_for(Loaded)
        running.send(question("a", "hello", temperature=-1))
        failed = await running.wait_for(RequestFailed)
        assert isinstance(failed, RequestFailed)
        assert "temperature" in failed.error
        running.send(question("b", "long " * 600))
        full = await running.wait_for(ContextFull)
        assert isinstance(full, ContextFull)
        assert full.num_tokens >= full.max_model_len
        running.send(Pace(0.5))  # otherwise the answer may have ended before the next question is read
        running.send(question("c", "hello"))
        running.send(question("d", "hello"))
        refused = await running.wait_for(RequestFailed, 2)
        running.send(Pace(0))
        assert isinstance(refused, RequestFailed)
        assert "still being generated" in refused.error
        finished = await running.wait_for(Finished)
        assert isinstance(finished, Finished)
        assert finished.request_id == "c"


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


async def test_a_slow_pace_hears_commands_at_once(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        running.send(Pace(0.01))
        running.send(Generate("a", "c", turns("hello"), GREEDY))
        await running.find(Started)
        running.send(Pace(50))  # the next step would be due in a minute and a half
        assert (await running.find(Finished)).finish_reason == "length"
        running.send(Pace(0.01))
        running.send(Inspect(0))
        await running.find(BlockFacts)  # the process has heard the pace, and had nothing to do
        running.send(Generate("b", "c", turns("hello"), GREEDY))
        await running.find(Started, lambda event: event.request_id == "b")
        running.send(Abort("b"))
        running.send(Pace(0))
        assert (await running.find(Finished, lambda event: event.request_id == "b")).finish_reason == "abort"


async def test_a_branch_begins_at_any_earlier_answer(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        running.send(question("a", "hello"))
        await running.find(Finished)
        text = "".join(event.text for event in running.events if isinstance(event, TextDelta))
        for number, name in enumerate(("b", "c"), 2):
            running.send(Generate(name, "c", turns("hello", text, f"again {name}"), GREEDY))
            await running.wait_for(Finished, number)
        first = await running.find(Started, lambda event: event.request_id == "b")
        second = await running.find(Started, lambda event: event.request_id == "c")
        assert 0 < first.num_cached_tokens <= second.num_cached_tokens
        running.send(Generate("d", "c", turns("hello", text, "again b"), {**GREEDY, "seed": 1}))
        again = await running.find(Started, lambda event: event.request_id == "d")
        assert again.num_cached_tokens == again.num_prompt_tokens - 1, "the question itself has been computed, too"
        running.send(Drop("b"))
        await running.pool(lambda pool: not pool.tables_of("b") and pool.tables_of("d"))


async def test_candidates_share_the_prompt_until_one_is_kept(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        running.send(question("a", "hello " * 9, temperature=1.0, seed=1, n=3))
        await running.find(Finished, lambda event: event.index == 2)
        pool = await running.pool(lambda pool: [t.state for t in pool.tables_of("a")] == ["idle"] * 3)
        tables = [table.blocks for table in pool.tables_of("a")]
        assert tables[0][0] == tables[1][0] == tables[2][0]
        assert pool.figures.shared_blocks > 0
        assert pool.counts.num_copies >= 2 or pool.tables_of("a")[0].num_tokens % 16 == 12
        running.send(Keep("a", 1))
        pool = await running.pool(lambda pool: len(pool.tables) == 1)
        assert pool.tables_of("a")[0].index == 1
        kinds = {entry.kind for entry in pool.log}
        assert {"allocate", "fork", "free"} <= kinds


async def test_beams_are_told_while_they_change(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        params = {"beam_width": 3, "max_tokens": 60, "ignore_eos": True}
        running.send(Generate("a", "c", turns("hello"), params))
        await running.find(Finished, lambda event: event.index == 2)
        pictures = [event.beams for event in running.events if isinstance(event, BeamsChanged)]
        assert len(pictures[-1]) == 3
        assert all(beam.finished for beam in pictures[-1])
        for beams in pictures:
            assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
        await running.pool(lambda pool: [t.state for t in pool.tables_of("a")].count("idle") >= 1)
        running.send(Keep("a", 2))
        await running.pool(lambda pool: len(pool.tables) == 1)
        running.send(Forget("c"))
        await running.pool(lambda pool: not pool.tables)


@pytest.mark.parametrize("stop", [(), ("a", "e", "o")])
def test_a_beam_goes_by_its_place_among_the_answers(stop: tuple[str, ...], tiny_model: Path) -> None:
    engine = load_engine(str(tiny_model), EngineConfig(device="cpu", num_blocks=60))
    conversations = Conversations(Driver(engine), lambda event: None)
    params = {"beam_width": 4, "max_tokens": 30, "ignore_eos": True, "stop": list(stop), "early_stopping": True}
    conversations.handle(Generate("a", "c", turns("hello"), params))
    num_ended = 0  # most that had ended while others ran
    while not conversations.is_idle:
        step(conversations)
        if conversations.answers and (owners := conversations.own()) and len(owners) == 4:
            told = sorted(engine.requests.output_of(conversations.answers["a"].group).outputs, key=by_score)
            num_ended = max(num_ended, sum(each.finish_reason is not None for each in told))
            shown = [owner for owner in owners.values() if owner.index < len(told)]
            assert len(shown) == sum(each.finish_reason is None for each in told)
            for owner in shown:
                assert told[owner.index].token_ids == owner.sequence.output_token_ids
    assert bool(num_ended) == bool(stop)
    stayed = [(owner.index, owner.sequence.output_token_ids) for owner in conversations.own().values()]
    answers = [each.token_ids for each in conversations.kept["a"].outputs]
    for place, token_ids in stayed:
        own = [common_length(answer, token_ids) for answer in answers]
        assert place == own.index(max(own)), "it goes by the answer that has most of its tokens"
        others = [common_length(answers[place], ids) for _, ids in stayed]
        assert common_length(answers[place], token_ids) == max(others), "no other beam is nearer to that answer"
    if not stop:
        assert all(answers[place][: len(token_ids)] == token_ids for place, token_ids in stayed)
    conversations.handle(Keep("a", 1))
    assert [owner.index for owner in conversations.own().values()] == [1]
    conversations.handle(Drop("a"))
    assert not engine.cache.tables


async def test_a_beginning_with_a_file_is_pinned_while_it_is_told(engine: Running, tiny_model: Path) -> None:
    file = "hello there " * 20
    async with engine(str(tiny_model), num_blocks=120) as running:
        running.send(Generate("a", "c", turns(file), GREEDY, num_pinned=1))
        await running.find(Finished)
        text = "".join(event.text for event in running.events if isinstance(event, TextDelta))
        pool = await running.pool(lambda pool: pool.tables_of(FILES))
        [pinned] = pool.tables_of(FILES)
        assert pinned.state == "pinned"
        assert pinned.blocks == pool.tables_of("a")[0].blocks[: len(pinned.blocks)], "it takes no block of its own"
        assert len(pinned.blocks) >= len(file) // 4 // 16
        running.send(Drop("a"))
        await running.pool(lambda pool: not pool.tables_of("a"))
        running.send(Generate("b", "c", turns(file, text, "again"), GREEDY, num_pinned=1))
        await running.find(Finished, lambda event: event.request_id == "b")
        again = await running.find(Started, lambda event: event.request_id == "b")
        assert again.num_cached_tokens >= pinned.num_tokens
        pool = await running.pool(lambda pool: pool.tables_of("b") and pool.tables_of("b")[0].state == "idle")
        assert [table.blocks for table in pool.tables_of(FILES)] == [pinned.blocks]
        running.send(Generate("d", "c", turns("something else"), GREEDY))
        await running.pool(lambda pool: not pool.tables_of(FILES))
        await running.find(Finished, lambda event: event.request_id == "d")
        running.send(Generate("e", "c", turns(file), GREEDY, num_pinned=1))
        await running.pool(lambda pool: pool.tables_of(FILES))
        running.send(Forget("c"))
        await running.pool(lambda pool: not pool.tables)


async def test_a_file_that_needs_much_of_the_pool_is_not_pinned(tiny_model: Path) -> None:
    engine = load_engine(str(tiny_model), EngineConfig(device="cpu", num_blocks=24))
    said: list[Event] = []
    conversations = Conversations(Driver(engine), said.append)
    for number, question in enumerate(["hello " * 12, "hello " * 60, "hello " * 90]):
        conversations.handle(Generate(str(number), "c", turns(question), {**GREEDY, "max_tokens": 60}, num_pinned=1))
        while not conversations.is_idle:
            step(conversations)
    assert not [event for event in said if isinstance(event, RequestFailed)]
    assert 4 * engine.scheduler.idle.num_pinned_blocks <= 24


async def test_an_answer_is_shorter_than_its_minimum_where_the_pool_has_less_space(tiny_model: Path) -> None:
    engine = load_engine(str(tiny_model), EngineConfig(device="cpu", num_blocks=16))
    said: list[Event] = []
    conversations = Conversations(Driver(engine), said.append)
    conversations.handle(Generate("a", "c", turns("hello " * 9), {**GREEDY, "max_tokens": 250, "min_tokens": 240}))
    while not conversations.is_idle:
        step(conversations)
    [finished] = [event for event in said if isinstance(event, Finished | RequestFailed)]
    assert isinstance(finished, Finished), finished


async def test_probabilities_of_the_tokens(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        running.send(question("a", "hello", logprobs=3))
        await running.find(Finished)
        tokens = [token for event in running.events if isinstance(event, TextDelta) for token in event.tokens]
        assert len(tokens) == 12
        for token in tokens:
            assert len(token.top_texts) == 3
            assert token.text == token.top_texts[0]
            assert token.logprob == pytest.approx(token.top_logprobs[0], abs=1e-5)


async def test_an_answer_is_continued(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        said = turns("hello", "so it begins")
        running.send(Generate("a", "c", said, GREEDY, continues=True))
        went_on = await running.find(Started, lambda event: event.request_id == "a")
        await running.find(Finished, lambda event: event.request_id == "a")
        running.send(Generate("b", "d", said[:1], GREEDY))
        asked = await running.find(Started, lambda event: event.request_id == "b")
        await running.find(Finished, lambda event: event.request_id == "b")
        running.send(Generate("c", "e", said, GREEDY))
        anew = await running.find(Started, lambda event: event.request_id == "c")
        assert asked.num_prompt_tokens < went_on.num_prompt_tokens < anew.num_prompt_tokens


async def test_the_system_prompt_is_pinned_and_unpinned(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        running.send(Pin("you are brief " * 4))
        pool = await running.pool(lambda pool: pool.figures.pinned_blocks)
        assert [table.state for table in pool.tables.values()] == ["pinned"]
        running.send(Pin("long " * 400))
        await running.find(Notice, lambda event: "not pinned" in event.text)
        await running.pool(lambda pool: not pool.figures.pinned_blocks)


async def test_a_block_tells_what_it_holds(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model)) as running:
        running.send(question("a", "hello " * 9))
        await running.find(Finished)
        pool = await running.pool(lambda pool: [t.state for t in pool.tables.values()] == ["idle"])
        table = pool.tables_of("a")[0]
        running.send(Inspect(table.blocks[1]))
        facts = await running.find(BlockFacts)
        assert (pool.state(facts.block), pool.ref_counts[facts.block], pool.filled[facts.block]) == (OWNED, 1, 16)
        assert pool.holders(facts.block) == [(table, 1)]
        assert len(facts.tokens) == 16
        assert facts.node is not None
        assert facts.age is not None
        running.send(Forget("c"))
        await running.pool(lambda pool: pool.state(table.blocks[1]) is CACHED)
        running.send(Inspect(table.blocks[1]))
        cached = await running.wait_for(BlockFacts, 2)
        assert isinstance(cached, BlockFacts)
        assert (cached.block, cached.tokens) == (facts.block, facts.tokens)
        running.send(Inspect(10**6))
        running.send(Inspect(31))
        free = await running.find(BlockFacts, lambda event: event.block == 31)
        assert (free.tokens, free.node, free.age) == ([], None, None)


async def test_pressure_is_told_as_swaps_and_evictions(engine: Running, tiny_model: Path) -> None:
    async with engine(str(tiny_model), num_blocks=20, admission="optimistic") as running:
        for name in "abc":
            running.send(question(name, "hello " * 12, name, max_tokens=120))
        await running.wait_for(Finished, 3)
        pool = await running.pool(lambda pool: all(t.state == "idle" for t in pool.tables.values()) and pool.tables)
        kinds = {entry.kind for entry in pool.log}
        assert {"preempt", "swap_out", "swap_in"} <= kinds
        assert pool.counts.num_preemptions > 0
        steps = [step for event in running.events if isinstance(event, Stepped) for step in event.steps]
        assert sum(step.num_swapped_out for step in steps) == pool.counts.num_swapped_out
        assert all(0 <= step.device_seconds <= step.seconds for step in steps)


async def test_a_model_that_is_not_there_is_one_line(engine: Running, tmp_path: Path) -> None:
    async with engine(str(tmp_path / "nowhere")) as running:
        failed = await running.wait_for(LoadFailed)
        assert isinstance(failed, LoadFailed)
        assert "nowhere" in failed.error
        assert "\n" not in failed.error


def test_messages_survive_the_pipe() -> None:
    log = [LogEntry(0.5, "copy", 1, "a", [3, 4], None, 2)]
    tables = [TableView(1, "a", 0, "idle", 16, [3]), TableView(2, "a", 1, "running", 17, [5], keep=1)]
    assert set(astuple(CacheCounts())) == {0}, "a pool in which nothing has happened"
    picture = CacheChanged(tables, [2], [8], [9], CacheCounts(num_copies=7), log, 1)
    delta = TextDelta("a", 0, "x", 1, [TokenChoice("x", -0.5, ["x", "\x1b"], [-0.5, -2.0])])
    steps = Stepped([StepReport(1, 2, 512, 0, 0, 0, 0, 0.25, 0.2, 1e9)])
    facts = BlockFacts(3, ["x"], None, "", 1.5)
    commands = (Load("m", {"device": "cpu", "x": 1.0}), question("a", "é\u2028\n"))
    events = (picture, delta, steps, facts, Loading(Progress("weights", 3, None, "layers")), BeamsChanged("a", []))
    for messages, decode in ((commands, decode_command), (events, decode_event)):
        for message in messages:
            line = encode(message)
            assert line.count(b"\n") == 1
            assert decode(line) == message
    # Characters that UTF-8 lacks are replaced, as they are before a model sees them.
    assert decode_command(encode(question("a", "one\ud800"))) == question("a", "one\ufffd")


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"{",
        b"",
        b"\xff",
        b"no message",
        b'{"message": "Nothing"}',
        b'{"message": "Abort", "x": 1}',
        b'{"message": "Abort"}',
        b'{"message": "Abort", "request_id": 3}',
        b'{"message": "Notice"}',
        b'{"message": "Notice", "text": "x", "more": 1}',
        b'{"message": "CacheChanged", "tables": [[1, "a"]]}',
        b'{"message": "CacheChanged", "counts": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]}',
        b'{"message": "Stepped", "steps": [{"number": 1}]}',
        b'{"message": "CacheChanged", "gone": ["x"]}',
    ],
)
def test_strangers_messages_are_refused_in_one_line(line: bytes) -> None:
    for decode in (decode_command, decode_event):
        with pytest.raises(ValueError) as caught:
            decode(line)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("least", "most", "event"),
    [
        (0, 1 << 53, lambda number: BlockFacts(number, [], None, "", None)),
        (1, 1 << 53, lambda number: Reading("a", 0, number, None)),
        (0, 1 << 20, lambda number: TextDelta("a", number, "", 0)),
        (0, 10**12, lambda number: Reading("a", 0, 1, float(number))),
        (-(1 << 53), 1 << 53, lambda number: CacheChanged(gone=[number])),
    ],
)
def test_numbers_are_exact_in_json_and_within_their_bounds(
    least: int, most: int, event: Callable[[int], Event]
) -> None:
    for number in (least, least + 1, most - 1, most):
        assert decode_event(encode(event(number))) == event(number)
    for number in (least - 1, most + 1):
        with pytest.raises(ValueError):
            decode_event(encode(event(number)))


def test_no_side_takes_the_others_messages() -> None:
    with pytest.raises(ValueError):
        decode_event(encode(Abort("a")))
    with pytest.raises(ValueError):
        decode_command(encode(Notice("x")))
