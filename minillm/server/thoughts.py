"""A model's thoughts before its answer: ``<think>…</think>`` at the beginning, perhaps opened by the template."""

from __future__ import annotations

from typing import Any

from minillm.server.bodies import BadField, ChatBody
from minillm.server.parts import Part, Reader, ThoughtPart

_OPEN, _CLOSE = "<think>", "</think>"


class ThoughtReader:
    """Separates the thoughts at the beginning of an answer. ``inner`` reads the text after them.

    Args:
        opened: the prompt ends with the opening tag.
    """

    def __init__(self, inner: Reader, *, opened: bool) -> None:
        self._inner = inner
        self._held = ""
        self._stage = self._thinking if opened else self._start
        self._has_thought = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._stage(final=False)

    def finish(self) -> list[Part]:
        return [*self._stage(final=True), *self._inner.finish()]

    def _start(self, *, final: bool) -> list[Part]:
        text = self._held.lstrip()
        if text.startswith(_OPEN):
            self._held = text.removeprefix(_OPEN)
            self._stage = self._thinking
        elif _OPEN.startswith(text) and not final:
            return []
        else:
            self._stage = self._answering
        return self._stage(final=final)

    def _thinking(self, *, final: bool) -> list[Part]:
        if not self._has_thought:
            self._held = self._held.lstrip()
        thought, closing, after = self._held.partition(_CLOSE)
        if closing:
            self._held, self._stage = after, self._gap
            thought = thought.rstrip()
        elif not final:
            kept = next((n for n in range(len(_CLOSE) - 1, 0, -1) if self._held.endswith(_CLOSE[:n])), 0)
            thought = self._held[: len(self._held) - kept].rstrip()
            self._held = self._held[len(thought) :]
        self._has_thought |= bool(thought)
        parts: list[Part] = [ThoughtPart(thought)] if thought else []
        return [*parts, *self._gap(final=final)] if closing else parts

    def _gap(self, *, final: bool) -> list[Part]:
        """Skip the space between thoughts and answer, which belongs to neither."""
        self._held = self._held.lstrip()
        if not self._held:
            return []
        self._stage = self._answering
        return self._answering(final=final)

    def _answering(self, *, final: bool) -> list[Part]:
        text, self._held = self._held, ""
        return self._inner.push(text)


def template_options(body: ChatBody, *, has_switch: bool) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template. Raises BadField.

    Args:
        has_switch: the template supports ``enable_thinking``.
    """
    found: dict[str, bool] = {}
    for name, value in (body.chat_template_kwargs or {}).items():
        if name != "enable_thinking":
            raise BadField(f"chat_template_kwargs: unknown {name!r}; known: enable_thinking", "chat_template_kwargs")
        if not isinstance(value, bool):
            raise BadField("chat_template_kwargs: enable_thinking must be true or false", "chat_template_kwargs")
        found["chat_template_kwargs"] = value
    if body.reasoning_effort is not None:
        found["reasoning_effort"] = body.reasoning_effort != "none"
    if not found:
        return {}
    first = next(iter(found))
    if len(set(found.values())) > 1:
        raise BadField("reasoning_effort: contradicts chat_template_kwargs; leave one out", "reasoning_effort")
    if not has_switch:
        raise BadField(f"{first}: this model's chat template cannot turn thinking on or off; leave it out", first)
    if body.messages is None:
        raise BadField(f"{first}: a fork continues the answer itself; leave it out", first)
    return {"enable_thinking": found[first]}
