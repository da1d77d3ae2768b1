"""``minillm demo``: a guided tour of the cache on the real engine.

The block pool is small, so the cache fills up within minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from textual import work
from textual.binding import Binding
from textual.content import Content
from textual.widgets import Static

from minillm.service.messages import Abort, Forget, Generate, Pace
from minillm.ui.app import ChatApp
from minillm.ui.bars import hidden_keys
from minillm.ui.chat.conversation import Answer
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat_screen import key_of
from minillm.ui.memory.pool import Pool
from minillm.ui.numbers import plural
from minillm.ui.settings import Settings, with_param

# 16 x 48 = 768 tokens: enough for each of the tour's conversations, too few for all of them at once. Speculation is
# off, because draft tokens would desynchronize the three answers of the last stop. The first answer would end early,
# and its blocks would be free for the others.
DEMO_ENGINE = {
    "num_blocks": 48, "block_size": 16, "max_model_len": 512, "admission": "optimistic", "speculate": "off",
}  # fmt: skip
DEMO_SAMPLING = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 48, "seed": 1}
_STEPS_PER_SECOND = 10.0  # engine steps per second at speed 1
_READING = 6.0  # seconds for the user to read an explanation, at speed 1
_PATIENCE = 120.0  # maximum seconds to wait until a stop has shown its event
_SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


class Interrupted(Exception):
    """Ends a stop: the user has left the conversation or the model that it is about."""


class Narration(Static):
    """Shows the tour's explanation above the chat."""


@dataclass(frozen=True)
class Stop:
    """A stop of the tour, which explains one event in the cache.

    Attributes:
        text: the explanation.
        view: the memory view to show.
        act: causes the event. Returns whether it has happened.
    """

    name: str
    text: str
    view: str
    act: Callable[[DemoApp], Awaitable[bool]]


async def _fork(tour: DemoApp) -> bool:
    return await tour.ask("And what is a fork?") and tour.answer.num_cached_tokens > 0


async def _copies(tour: DemoApp) -> bool:
    before = tour.pool.counts.num_copies
    await tour.ask("Name an animal and say why you like it.", n=4)
    return await tour.until(lambda: tour.pool.counts.num_copies > before)


async def _accept(tour: DemoApp) -> bool:
    owner = tour.answer.request_id
    tour.chat.action_command("accept", "2")
    await asyncio.sleep(1.0)
    return await tour.until(lambda: len(tour.pool.tables_of(owner)) == 1)


async def _beams(tour: DemoApp) -> bool:
    answered = await tour.ask("Write one sentence about the sea.", beam_width=4)
    tour.chat.action_command("accept", "1")
    return answered


async def _prefix_hit(tour: DemoApp) -> bool:
    before = tour.pool.counts.num_hit_tokens
    tour.chat.action_command("new")
    await tour.ask("What is a page table, in one sentence?")
    return await tour.until(lambda: tour.pool.counts.num_hit_tokens > before)


async def _eviction(tour: DemoApp) -> bool:
    before = tour.pool.counts.num_evictions
    for number in range(12):
        name = tour.generate(f"Tell me a long story about the number {number * 37 + 11}. " * 4, 60)
        await tour.until(lambda name=name: tour.has_ended(name))  # type: ignore[misc]
        tour.chat.chat_pane.send(Forget(name))
        if tour.pool.counts.num_evictions > before:
            return True
    return False


async def _preemption(tour: DemoApp) -> bool:
    before = tour.pool.counts
    names = [tour.generate(f"Write a poem about {what}. " * 3, 260) for what in ("rain", "iron", "bread")]

    def came_back() -> bool:
        return tour.pool.counts.num_swapped_in > before.num_swapped_in

    await tour.until(lambda: came_back() or all(map(tour.has_ended, names)))
    for name in names:
        tour.chat.chat_pane.send(Abort(name))
        tour.chat.chat_pane.send(Forget(name))
    await tour.until(lambda: not any(table.owner in names for table in tour.pool.tables.values()))
    return came_back() and tour.pool.counts.num_preemptions > before.num_preemptions


STOPS = (
    Stop("blocks",
         "A question is computed. Its tokens fill blocks of 16 slots, allocated from the pool as needed.", "pool",
         lambda tour: tour.ask("What is a page table, in one sentence?")),
    Stop("fork",
         "The next turn forks the last one. It shares all full blocks and computes only the new tokens.", "tables",
         _fork),
    Stop("copy on write",
         "Four answers to one question: the prompt is computed once and forked. An answer that writes to the shared "
         "last block copies it first: copy on write.", "strands",
         _copies),
    Stop("free",
         "One answer is accepted. Blocks that only the others held are freed.", "pool", _accept),
    Stop("beam search",
         "Beam search: at every step the best beams fork and the worst are freed. Keys and values do not move.",
         "strands", _beams),
    Stop("prefix hit",
         "A new conversation begins like an old one. The prefix cache still has its blocks: nothing is computed twice.",
         "events", _prefix_hit),
    Stop("eviction",
         "The pool fills with other work. Unreferenced blocks are evicted, the least recently used first.", "pool",
         _eviction),
    Stop("preemption",
         "Three long answers need more blocks than there are. The latest is preempted: its blocks are swapped to the "
         "CPU, and return when others are free.", "events", _preemption),
)  # fmt: skip


class DemoApp(ChatApp):
    """The chat app with a guided tour."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("space", "tour('next')", "Next", priority=True),
        Binding("p", "tour('pause')", "Pause", priority=True),
        *hidden_keys({"plus,equals_sign": "tour('faster')", "minus": "tour('slower')"}, priority=True),
    ]

    def __init__(self, settings: Settings, store: SessionStore, speed: float = 1.0, **options: Any) -> None:
        super().__init__(settings, store, **options)
        self.speed = speed
        self.paused = False
        self.number = 0  # number of the current stop; 0 before the first stop
        self.over = False
        self._go_on = asyncio.Event()
        self.missed: list[str] = []  # stops at which the event did not happen
        self._others = 0

    async def on_mount(self) -> None:
        self.call_after_refresh(self._play)

    @work(group="tour")
    async def _play(self) -> None:
        await self.chat.mount(Narration(), before="#body")
        self.chat.chat_pane.prompt.disabled = True
        self._show_caption("Loading the model.")
        await self._loaded()
        for self.number, stop in enumerate(STOPS, 1):
            if self.chat.memory_view != stop.view:
                self.chat.action_view(stop.view)
            self._show_caption(stop.text)
            await self._pause()
            happened = False
            with suppress(Interrupted):
                happened = await stop.act(self)
            if not happened:
                self.missed.append(stop.name)
                self._show_caption(f"{stop.text} It did not happen this time.")
            await self._pause()
            await self._loaded()
        counts = self.pool.counts
        self.over = True
        self.chat.chat_pane.send(Pace(0))
        missed = f"Not shown this time: {', '.join(self.missed)}. " if self.missed else ""
        words = (
            f"The tour is over: {plural(counts.num_copies, 'block')} copied on write, "
            f"{plural(counts.num_hit_tokens, 'token')} found in the cache, {plural(counts.num_evictions, 'eviction')}, "
            f"{plural(counts.num_preemptions, 'preemption')}. {missed}You can chat now."
        )
        self.chat.query_one(Narration).update(Content(words))
        prompt = self.chat.chat_pane.prompt
        prompt.disabled = False
        prompt.focus()

    async def _loaded(self) -> None:
        """Wait until a model is loaded, and slow its engine down."""
        while self.engine_state.phase != "ready" or self.chat.pool is None:
            await asyncio.sleep(0.05)
        self._set_pace()

    @property
    def pool(self) -> Pool:
        """Return the pool. Raises Interrupted if no model is loaded."""
        if self.chat.pool is None:
            raise Interrupted
        return self.chat.pool

    @property
    def answer(self) -> Answer:
        """Return the answer to the last question. Raises Interrupted in an empty conversation."""
        leaf = self.chat.chat_pane.conversation.leaf
        if leaf is None:
            raise Interrupted
        return leaf.answer

    def has_ended(self, name: str) -> bool:
        """Return whether the answer to the request ``name`` is complete. `generate` has sent the request."""
        return any(table.state == "idle" for table in self.pool.tables_of(name))

    async def until(self, condition: Callable[[], object]) -> bool:
        """Wait until ``condition`` returns true, at most `_PATIENCE` seconds. Return whether it did."""
        end = time.monotonic() + _PATIENCE
        while not (happened := bool(condition())) and time.monotonic() < end and self.engine_state.phase == "ready":
            await asyncio.sleep(0.05)
        return happened

    async def ask(self, question: str, **params: Any) -> bool:
        """Ask a question in the chat with these sampling parameters. Return whether it was answered."""
        for name, value in {"n": 1, "beam_width": 1, **params}.items():
            self.settings = with_param(self.settings, name, str(value))
        self.chat.chat_pane.prompt.post_message(PromptInput.Submitted(question))
        asked = await self.until(lambda: self.chat.chat_pane.run is not None)
        return await self.until(lambda: self.chat.chat_pane.run is None) and asked

    def generate(self, question: str, max_tokens: int) -> str:
        """Send a request as if from another user. Return the request's name."""
        self._others += 1
        name = f"request-{self._others}"
        params = {"temperature": 0.9, "max_tokens": max_tokens, "ignore_eos": True, "seed": self._others}
        self.chat.chat_pane.send(Generate(name, name, [{"role": "user", "content": question}], params))
        return name

    def _show_caption(self, text: str) -> None:
        state = "paused" if self.paused else f"speed {self.speed:g}"
        keys = (f"\n{state} · space: next · p: pause · + −: speed · {key_of(self, 'quit')}: quit", "$text-muted")
        line = Content.assemble((f"{self.number}/{len(STOPS)}  {text}", "bold"), keys)
        self.chat.query_one(Narration).update(line)

    def _set_pace(self) -> None:
        self.chat.chat_pane.send(Pace(_STEPS_PER_SECOND * self.speed))

    async def _pause(self) -> None:
        self._go_on.clear()
        end = time.monotonic() + _READING / self.speed
        while not self._go_on.is_set() and (self.paused or time.monotonic() < end):
            await asyncio.sleep(0.05)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # After the tour, its keys type letters again.
        return not (action == "tour" and self.over)

    def action_leave(self) -> None:
        """Quit at once: nothing here needs to be saved."""
        self.exit()

    def action_tour(self, what: str) -> None:
        if what == "next":
            self.paused = False
            self._go_on.set()
        elif what == "pause":
            self.paused = not self.paused
        else:
            at = min(range(len(_SPEEDS)), key=lambda i: abs(_SPEEDS[i] - self.speed))
            self.speed = _SPEEDS[max(0, min(len(_SPEEDS) - 1, at + (1 if what == "faster" else -1)))]
            self._set_pace()
        if self.number:
            self._show_caption(STOPS[self.number - 1].text)


def demo_settings(settings: Settings) -> Settings:
    """Return ``settings`` with the tour's own engine options and sampling parameters. The model stays."""
    engine = {**settings.engine, **DEMO_ENGINE}
    return replace(settings, engine=engine, sampling=dict(DEMO_SAMPLING), beams={}, system="")
