"""``/think`` and ``/depths``, and templates that have a switch for thinking."""

from __future__ import annotations

import jinja2
import pytest

from lib.ui import FAKE, answered, ask, chat, is_told, say, screen, seen, until
from minillm.text.chat_template import ChatTemplate
from minillm.ui.chat.candidates import CandidateCard
from minillm.ui.settings import Settings

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
        await until(pilot, lambda: screen(pilot).chat_pane.engine.phase == "ready")
        assert (await ask(pilot, "thinks?")).answer.text == "None"
        for word, told in (("off", "False"), ("on", "True")):
            await say(pilot, f"/think {word}")
            before = screen(pilot).chat_pane.conversation.leaf
            await say(pilot, "thinks?")
            assert (await answered(pilot, before)).answer.text == told
        await say(pilot, "/think maybe")
        assert screen(pilot).app.settings.thinks is True


@pytest.mark.anyio
async def test_a_template_without_the_switch_says_so() -> None:
    async with chat() as pilot:
        await say(pilot, "/think off")
        assert screen(pilot).app.settings.thinks is None


@pytest.mark.anyio
async def test_thoughts_are_limited_where_the_model_has_tags() -> None:
    async with chat("tags", engine_command=[*FAKE]) as pilot:
        await until(pilot, lambda: screen(pilot).chat_pane.engine.phase == "ready")
        await say(pilot, "/think 512")
        settings = screen(pilot).app.settings
        assert settings.sampling["max_reasoning_tokens"] == 512
        assert settings.request_params()["max_tokens"] == settings.sampling["max_tokens"] + 512
        assert "think 512" in seen(pilot)
        told = (await ask(pilot, "params")).answer.text
        assert "('max_reasoning_tokens', 512)" in told
        await say(pilot, "/beams 3")
        assert screen(pilot).app.settings.request_params()["max_reasoning_tokens"] == 512
        await say(pilot, "/think off")  # no switch: it answers at once
        assert screen(pilot).app.settings.sampling["max_reasoning_tokens"] == 0
        await say(pilot, "/think on")
        assert "max_reasoning_tokens" not in screen(pilot).app.settings.sampling


@pytest.mark.anyio
async def test_a_limit_needs_tags() -> None:
    async with chat() as pilot:
        for command in ("/think 512", "/depths 256,512"):
            await say(pilot, command)
            await until(pilot, lambda: is_told(pilot, "no <think> tags"))
            pilot.app.clear_notifications()
        assert screen(pilot).app.settings.request_params() == Settings("fake").request_params()


@pytest.mark.anyio
async def test_answers_at_several_depths_are_cards_with_their_cost() -> None:
    async with chat("thinker", engine_command=[*FAKE]) as pilot:
        await until(pilot, lambda: screen(pilot).chat_pane.engine.phase == "ready")
        await say(pilot, "/depths 8, 3,20")
        before = screen(pilot).chat_pane.conversation.leaf
        await say(pilot, "why?")
        turn = await answered(pilot, before)
        cards = list(screen(pilot).query(CandidateCard))
        titles = [(str(card.border_title), str(card.border_subtitle)) for card in cards]
        assert titles == [
            ("1 · 3 tokens of thought", "4 tokens · ✓ · 3 shared"),
            ("2 · 8 tokens of thought", "4 tokens · ✓ · 8 shared"),
            ("3 · 20 tokens of thought", "23 tokens · ✓"),
        ]
        for text in ("answer 1", "answer 2", "the last answer", "depths 3, 8, 20"):
            assert text in seen(pilot)
        assert "hm" not in seen(pilot)
        await say(pilot, "/accept 2")
        assert turn.answer.text == f"{'hm ' * 8}Enough.</think>answer 2"
        assert turn.answer.in_reasoning
        await say(pilot, "/depths off")
        assert screen(pilot).app.settings.num_candidates == 1
        for wrong in ("/depths 5", "/depths 3,x", "/depths 1,2,3,4,5,6,7,8,9,10"):
            await say(pilot, wrong)
            assert screen(pilot).app.settings.depths == ()
        await say(pilot, "/depths 2,4")
        await say(pilot, "/n 3")
        assert screen(pilot).app.settings.num_candidates == 3
