"""``/tour``: a fork and copy on write within a minute, in the chat itself, seen in the view of strands."""

import asyncio
from dataclasses import replace

from minillm.service.messages import Pace
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.talk import Talk
from minillm.ui.engine_app import EngineApp
from minillm.ui.numbers import count

QUESTION = "Name an animal, and say in one sentence why you like it."
_SAMPLING = {"temperature": 0.9, "max_tokens": 40, "n": 3}
_STEPS_PER_SECOND = 6.0  # so that people can watch
_READING = 5.0  # seconds for a line
_LONGEST = 90.0  # seconds for the answers, where a machine is slow


async def give_tour(talk: Talk) -> None:
    """Ask one question for three answers in an empty conversation, and say what happens. The settings of
    the user come back at the end, however it ends.
    """
    app = talk.app
    before = app.settings
    try:
        # Around the watchers: nothing of it is the user's choice.
        app.set_reactive(EngineApp.settings, replace(before, sampling=_SAMPLING, beams={}))
        talk.send(Pace(_STEPS_PER_SECOND))
        await _play(talk)
    finally:
        talk.send(Pace(0))
        app.set_reactive(EngineApp.settings, before)


async def _play(talk: Talk) -> None:
    def copies() -> int:
        return 0 if talk.pool is None else talk.pool.counts.num_copies

    async def tell(text: str) -> None:
        await talk.transcript.add_note(f"tour: {text}")
        await asyncio.sleep(_READING)

    at_first = copies()
    await tell(
        "what the model has read stays in memory, in blocks of some words each: a line per block beside this. "
        "Now one question is asked for three answers."
    )
    talk.prompt.post_message(PromptInput.Submitted(QUESTION))  # the talk asks, in its own task
    await tell(
        "fork: the question is read once. Its blocks are the thick lines (┃); all three answers go on from there, and "
        "each has thin lines of its own (│), in the colour of its card."
    )
    waited = 0.0
    while (talk.run is not None or talk.conversation.leaf is None) and waited < _LONGEST:
        await asyncio.sleep(0.1)
        waited += 0.1
    asked = talk.conversation.leaf
    if asked is None or asked.question != QUESTION or not asked.answer.candidates:
        return  # it was stopped, or the user has gone elsewhere
    copied = copies() - at_first
    await tell(
        "copy on write: the question ended in the midst of a block, and three answers came to write there. "
        f"So that block was copied {count(copied)} times, and nothing else: all blocks before it "
        "are still shared."
    )
    talk.call_command("accept", "1")
    await tell(
        "free: one answer was taken. The blocks that only the others held are free again, and the rest stays. That is "
        "all there is: fork, copy on write, free. Ask on, or try /n 3 and /beams 4; F7 hides this view."
    )
