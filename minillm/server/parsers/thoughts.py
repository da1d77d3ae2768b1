"""Read a model's reasoning ("thoughts") before its answer, switch reasoning on or off, and limit its length."""

from __future__ import annotations

from typing import Any

from minillm.server.bodies import BadField, ChatBody
from minillm.server.parsers.parts import Part, Reader, ThoughtPart
from minillm.text.reasoning import CLOSE, LeadingReasoning, Pieces
from minillm.text.reasoning_budget import NO_LIMIT

# Maximum reasoning tokens by ``reasoning_effort``.
EFFORTS = {"none": 0, "minimal": 128, "low": 512, "medium": 2048, **dict.fromkeys(("high", "xhigh", "max"), NO_LIMIT)}


class ThoughtReader:
    """Separates the reasoning at the beginning of an answer from the rest of its text.

    Args:
        inner: reads the text after the reasoning.
        opened: the answer begins inside the reasoning.
        has_reasoned: the answer continues reasoning that has text already.
    """

    def __init__(self, inner: Reader, *, opened: bool, has_reasoned: bool = False) -> None:
        self._inner = inner
        self._splitter = LeadingReasoning(inside=opened, has_reasoned=has_reasoned)

    def push(self, text: str) -> list[Part]:
        return self._parts(self._splitter.push(text))

    def finish(self) -> list[Part]:
        return self._parts(self._splitter.finish()) + self._inner.finish()

    def _parts(self, pieces: Pieces) -> list[Part]:
        parts: list[Part] = []
        for is_thought, text in pieces:
            parts += [ThoughtPart(text)] if is_thought else self._inner.push(text)
        return parts


def with_effort(params: dict[str, Any], effort: str | None, template: str, *, has_switch: bool) -> dict[str, Any]:
    """Return a request's parameters, with ``max_reasoning_tokens`` set according to ``reasoning_effort``.

    A ``max_reasoning_tokens`` in ``params`` takes precedence. If the template has no reasoning tags, the parameters
    stay unchanged, and the effort only switches the reasoning on or off.

    Args:
        params: the parameters of the request.
        effort: the field ``reasoning_effort``.
        template: the chat template.
        has_switch: the template supports ``enable_thinking``.
    """
    if effort is None or CLOSE not in template or (effort == "none" and has_switch):
        return params
    return {"max_reasoning_tokens": EFFORTS[effort], **params}


def template_options(body: ChatBody, template: str, *, has_switch: bool) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template, such as ``enable_thinking``.

    Raises BadField if the chat template does not support one of these variables, or if fields of the request contradict
    each other.

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
    if not has_switch and (CLOSE not in template or "chat_template_kwargs" in found):
        raise BadField(f"{first}: this model's chat template cannot turn thinking on or off; leave it out", first)
    if body.messages is None:
        raise BadField(f"{first}: a fork continues the answer itself; leave it out", first)
    return {"enable_thinking": found[first]} if has_switch else {}
