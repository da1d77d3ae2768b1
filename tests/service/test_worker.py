"""The engine's process, as the app drives it: a real worker on a small random model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from minillm.service.client import EngineProcess
from minillm.service.messages import (
    Abort,
    CacheChanged,
    Command,
    ContextFull,
    Event,
    Finished,
    Forget,
    Generate,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    RequestFailed,
    Started,
    TableView,
    TextDelta,
    decode,
    encode,
)

pytestmark = pytest.mark.anyio
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engine:
    """The process, and every event that it has sent."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.events: list[Event] = []

    async def listen(self) -> None:
        async for event in self.process.events():
            self.events.append(event)

    async def wait_for(self, kind: type[Event], count: int = 1) -> Event:
        """The ``count``-th event of this kind."""
        with anyio.fail_after(60):
            while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
                await asyncio.sleep(0.01)
        return found[count - 1]

    async def pool(self, **wanted: int) -> CacheChanged:
        """The latest picture of the pool, once it has these values."""
        with anyio.fail_after(60):
            while True:
                pictures = [event for event in self.events if isinstance(event, CacheChanged)]
                if pictures and all(getattr(pictures[-1], name) == value for name, value in wanted.items()):
                    return pictures[-1]
                await asyncio.sleep(0.01)

    def send(self, command: Command) -> None:
        self.process.send(command)


@asynccontextmanager
async def engine(tmp_path: Path, model: str, **options: object) -> AsyncIterator[Engine]:
    process = await EngineProcess.start(tmp_path / "log")
    running = Engine(process)
    listening = asyncio.create_task(running.listen())
    running.send(Load(model, {"device": "cpu", "num_blocks": 32, **options}))
    try:
        yield running
    finally:
        await process.stop()
        await listening


def question(request: str, text: str, conversation: str = "c", **params: object) -> Generate:
    return Generate(request, conversation, [{"role": "user", "content": text}], {**GREEDY, **params})


async def test_a_conversation_keeps_its_blocks_and_the_next_turn_reuses_them(tmp_path: Path, tiny_model: Path) -> None:
    async with engine(tmp_path, str(tiny_model)) as running:
        loaded = await running.wait_for(Loaded)
        assert isinstance(loaded, Loaded)
        assert (loaded.num_blocks, loaded.block_size, loaded.device) == (32, 16, "cpu")
        assert loaded.has_chat_template
        assert any(isinstance(event, Loading) and event.label == "loading weights" for event in running.events)
        running.send(question("a", "hello"))
        first = await running.wait_for(Finished)
        assert isinstance(first, Finished)
        assert (first.num_output_tokens, first.finish_reason) == (12, "length")
        text = "".join(event.text for event in running.events if isinstance(event, TextDelta))
        idle = await running.pool()
        with anyio.fail_after(20):
            while not (idle := await running.pool()).tables or idle.tables[0].state != "idle":
                await asyncio.sleep(0.01)
        assert idle.tables[0].owner == "c"
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
        running.send(Forget("c"))
        await running.pool(free_blocks=32, used_slots=0)


async def test_an_answer_can_be_stopped_and_forgotten(tmp_path: Path, tiny_model: Path) -> None:
    async with engine(tmp_path, str(tiny_model)) as running:
        await running.wait_for(Loaded)
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
        await running.pool(free_blocks=32)


async def test_bad_requests_fail_alone(tmp_path: Path, tiny_model: Path) -> None:
    async with engine(tmp_path, str(tiny_model)) as running:
        await running.wait_for(Loaded)
        running.send(question("a", "hello", temperature=-1))
        failed = await running.wait_for(RequestFailed)
        assert isinstance(failed, RequestFailed)
        assert "temperature" in failed.error
        running.send(question("b", "long " * 600))
        full = await running.wait_for(ContextFull)
        assert isinstance(full, ContextFull)
        assert full.num_tokens >= full.max_model_len
        running.send(question("c", "hello"))
        running.send(question("d", "hello"))
        refused = await running.wait_for(RequestFailed, 2)
        assert isinstance(refused, RequestFailed)
        assert "still being generated" in refused.error
        finished = await running.wait_for(Finished)
        assert isinstance(finished, Finished)
        assert finished.request_id == "c"


async def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    async with engine(tmp_path, str(tmp_path / "nowhere")) as running:
        failed = await running.wait_for(LoadFailed)
        assert isinstance(failed, LoadFailed)
        assert "nowhere" in failed.error
        assert "\n" not in failed.error


def test_messages_survive_the_pipe() -> None:
    picture = CacheChanged([(3, 1, 16)], [TableView(1, "c", "idle", 16, [3])], 7, 0, 1, 16, 0)
    for message in (Load("m", {"device": "cpu"}), question("a", "é\u2028\n"), picture):
        line = encode(message)
        assert line.count(b"\n") == 1
        assert decode(line) == message
    for bad in (b"[]", b'{"kind": "Nothing"}', b'{"kind": "Abort", "x": 1}', b"{"):
        with pytest.raises(ValueError):
            decode(bad)
