"""``/tour``: show a fork and copy on write in the chat itself, within a minute, with the strands view open."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from textual.content import Content
from textual.widgets import Static

from minillm.service.messages import Pace
from minillm.ui.chat.chat_pane import ChatPane
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.engine_app import EngineApp
from minillm.ui.memory.panel import MemoryPanel
from minillm.ui.memory.pool import COPIED
from minillm.ui.numbers import plural

QUESTION = "Name an animal, and say in one sentence why you like it."
_SAMPLING = {"temperature": 0.9, "max_tokens": 40, "n": 3}
_AT_FORK, _STEPS_PER_SECOND = 0.2, 6.0  # engine steps per second at the fork, and later: slow enough to watch
_READING, _WORDS = 6.0, 24  # seconds for a note of up to this many words; longer notes stay longer
_LONGEST = 90.0  # maximum seconds to wait for the answers, for a slow machine


async def give_tour(pane: ChatPane) -> None:
    """Ask one question for three answers in an empty conversation, and explain what happens.

    The user's settings are restored at the end, also after an error.
    """
    app = pane.app
    before = app.settings
    caption = Static(classes="caption")  # the notes, for a memory view that hides the chat pane
    try:
        await pane.screen.query_one(MemoryPanel).mount(caption, after=0)
        # Set the settings without calling watchers, because these are not the user's settings and must not be saved.
        app.set_reactive(EngineApp.settings, replace(before, sampling=_SAMPLING, beams={}))
        pane.is_paced = True
        pane.send(Pace(_AT_FORK))
        await _play(pane, caption)
    finally:
        if caption.is_attached:
            caption.remove()
        pane.is_paced = False
        pane.send(Pace(0))
        app.set_reactive(EngineApp.settings, before)


def reading_time(text: str) -> float:
    """Return the seconds for which a note is shown before the tour continues."""
    return _READING * max(1.0, len(text.split()) / _WORDS)


async def _play(pane: ChatPane, caption: Static) -> None:
    conversation = pane.conversation

    def copies() -> int:
        return 0 if pane.pool is None else pane.pool.counts.num_copies

    def is_answering() -> bool:
        return pane.run is not None

    def is_asked() -> bool:
        leaf = pane.conversation.leaf
        return is_answering() or (leaf is not None and not leaf.answer.is_open)

    async def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + _LONGEST
        while not condition() and time.monotonic() < end:
            await asyncio.sleep(0.05)

    async def say(text: str, *, wait: bool = True) -> None:
        caption.update(Content(text))
        note = f"tour · {text}"
        if pane.conversation is conversation:
            (conversation if conversation.leaf is None else conversation.leaf).notes.append(note)
            pane.save()
        await pane.transcript.add_note(note, "tour")
        if wait:
            await asyncio.sleep(reading_time(text))

    at_first = copies()
    await say(
        "text that the model has read stays in memory, in blocks of a few words each. The strands show one line per "
        "block. Now one question gets three answers. You don't need to type anything."
    )
    pane.prompt.post_message(PromptInput.Submitted(QUESTION))  # the chat pane asks, in its own task
    await until(is_asked)  # by then the question is in the transcript, and notes go below it
    await say(
        "fork: the question is read once. Its blocks are the thick lines (┃): all three answers share them, even the "
        "last block, which has free slots left.", wait=False
    )  # fmt: skip
    await until(lambda: copies() > at_first or not is_answering())
    await say(
        "copy on write: now each answer adds its first words to that last block. A shared block cannot be changed, so "
        f"each answer gets a copy of it ({COPIED}), and the last one keeps the original. All earlier blocks stay "
        "shared."
    )
    pane.send(Pace(_STEPS_PER_SECOND))
    await until(lambda: not is_answering())
    asked = pane.conversation.leaf
    if asked is None or asked.question != QUESTION or not asked.answer.candidates or asked.answer.is_open:
        return  # the user went elsewhere
    if asked.answer.finish_reason == "abort":
        await say("the tour ends here because the answers were stopped; /tour starts it again.", wait=False)
        return
    await say(
        "each answer continues in its own blocks, the thin lines (│) in the color of its card. "
        f"{plural(copies() - at_first, 'block')} copied; the question before that block is still stored only once."
    )
    pane.call_command("accept", "1")
    await say(
        "free: the tour accepted the first answer. Blocks that only the others held are freed, and the rest stays. "
        "That is all: fork, copy on write, free. Ask another question, or try /n 3 and /beams 4. F7 hides the strands."
    )
