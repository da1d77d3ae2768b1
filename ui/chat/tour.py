"""``/tour``: a fork and copy on write within a minute, in the chat itself, seen in the view of strands."""

import asyncio
from dataclasses import replace

from minillm.service.messages import Pace
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.talk import Talk
from minillm.ui.engine_app import EngineApp
from minillm.ui.numbers import plural

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
    await tell("one question, three answers. The question's tokens are computed once, into blocks of the pool.")
    talk.prompt.post_message(PromptInput.Submitted(QUESTION))  # the talk asks, in its own task
    await tell(
        "fork: each answer has a line beside this; the thick cells are the question's blocks, which all three share."
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
        f"copy on write: {plural(copied, 'block')} copied, as an answer first wrote into a last block that is shared. "
        "All blocks before it stay shared."
    )
    talk.call_command("accept", "1")
    await tell(
        "free: one answer was taken, and the blocks that only the others held are free again. F7 hides this view."
    )
