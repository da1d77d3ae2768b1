"""``/think``, and templates that have a switch for thinking."""

from __future__ import annotations

import jinja2
import pytest

from lib.ui import FAKE, answered, ask, chat, say, screen, until
from minillm.text.chat_template import ChatTemplate

QWEN = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)


@pytest.mark.parametrize("thinks", [None, True, False])
def test_a_template_is_told(thinks: bool | None) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    told = {} if thinks is None else {"enable_thinking": thinks}
    expected = jinja2.Template(QWEN).render(messages=messages, add_generation_prompt=True, **told)
    template = ChatTemplate(QWEN, {})
    assert template.render(messages, thinks=thinks) == expected
    assert ("</think>" in expected) == (thinks is False)
    assert template.has_thinking_switch
    assert not ChatTemplate("{{ messages[0].content }}", {}).has_thinking_switch


@pytest.mark.anyio
async def test_thinking_is_switched_where_the_template_can() -> None:
    async with chat("thinker", engine_command=[*FAKE]) as pilot:
        await until(pilot, lambda: screen(pilot).talk.engine.phase == "ready")
        assert (await ask(pilot, "thinks?")).answer.text == "None"
        for word, told in (("off", "False"), ("on", "True")):
            await say(pilot, f"/think {word}")
            before = screen(pilot).talk.conversation.leaf
            await say(pilot, "thinks?")
            assert (await answered(pilot, before)).answer.text == told
        await say(pilot, "/think maybe")
        assert screen(pilot).app.settings.thinks is True


@pytest.mark.anyio
async def test_a_template_without_the_switch_says_so() -> None:
    async with chat() as pilot:
        await say(pilot, "/think off")
        assert screen(pilot).app.settings.thinks is None
