"""Chat templates: render a conversation as the text format that the model was trained on.

A template comes with the model and is a program. Therefore it runs in a separate process (`minillm.text.sandbox`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minillm.checks import check_names, shown
from minillm.errors import ContextLengthError, UsageError
from minillm.text.control_tokens import END_OF_MESSAGE
from minillm.text.safe import clean_line
from minillm.text.sandbox import Sandbox
from minillm.text.tools import knows_tools, plain_calls, plain_tools, texts_in, written_down

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "name")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # synonyms; if a message has several, the first counts
_KEYS_OF = {"assistant": ("tool_calls", *_THOUGHTS), "tool": ("tool_call_id",)}  # in addition to _KEYS
_EMPTY_KEYS = ("audio", "function_call", "annotations", "tool_calls", *_THOUGHTS)  # ignored if empty
_MEMORY_BYTES = 512 << 20
_MAX_CHARACTERS = 16 << 20  # maximum characters of all messages together


def is_template(text: str) -> bool:
    """Return whether a text is a Jinja template and not, for example, the name of a file with one."""
    return "{{" in text or "{%" in text


class ChatTemplate:
    """A Jinja template and the process that renders it.

    Args:
        source: the text of the template.
        variables: additional names for the template, such as ``bos_token``.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._sandbox = Sandbox("chat template", _MEMORY_BYTES)

    @property
    def has_thinking_switch(self) -> bool:
        """Return whether the template has the variable ``enable_thinking``, which switches thinking on and off."""
        return "enable_thinking" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        thinks: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        num_known: int = 0,
    ) -> str:
        """Render the conversation as text.

        Args:
            messages: see `plain_messages`. If the template does not know the role developer, the role system replaces
                it. If the template rejects the conversation, adjacent messages with one role are joined by newlines.
            tools: see `minillm.text.tools.plain_tools`. If the template does not support tools, they are described in
                the system message.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: end inside the last message, so that generation continues this message.
            thinks: whether the model should think first, if `has_thinking_switch`; None: the template's default.
            num_known: number of first messages to leave out of the returned text. The last of these messages must be an
                answer. 0: leave out nothing.

        Raises:
            UsageError: a message is invalid, or the template rejects it.
            WeightsError: the template is broken, or takes too long, too much memory or too much text.
        """
        own = plain_messages(messages)
        if num_known:
            own[num_known - 1] = {"role": "assistant", "content": END_OF_MESSAGE}
        shown_tools = plain_tools(tools) if tools else None
        limit = 4 * sum(map(len, texts_in([own, shown_tools]))) + (1 << 18)
        if not knows_tools(self.source):
            own, shown_tools = written_down(own, shown_tools), None
        last = own[-1]["content"]
        for message in own:
            if message["role"] == "developer" and "developer" not in self.source:
                message["role"] = "system"
            if "reasoning_content" in message:
                message["thinking"] = message["reasoning_content"]  # the name used by gpt-oss and LFM2
        # If the space is missing from the result, the template trims its messages.
        own[-1]["content"] += f"{END_OF_MESSAGE} " if continue_final_message else ""
        variables = {**self._variables, "messages": own, "tools": shown_tools, "documents": None}
        if thinks is not None:
            variables["enable_thinking"] = thinks
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        answer = self._ask(variables, limit)
        if "refused" in answer and len(joined := _joined(own)) < len(own):  # many templates want roles to alternate
            answer = self._ask({**variables, "messages": joined}, limit)
        if "refused" in answer:
            raise UsageError(f"the chat template: {clean_line(str(answer['refused']), 300)}")
        text = str(answer["text"])
        if num_known:
            _, end, text = text.rpartition(END_OF_MESSAGE)
            if not end:
                raise UsageError("the chat template does not show earlier answers, so none can be continued")
        return _up_to_end(text, last) if continue_final_message else text

    def _ask(self, variables: Mapping[str, Any], limit: int) -> Mapping[str, Any]:
        return self._sandbox.ask({"template": self.source, "variables": variables, "limit": limit})


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with adjacent ones of the user or the system as one. Messages with a name stay apart."""
    found: list[dict[str, Any]] = []
    for message in messages:
        plain = message.keys() == {"role", "content"} and message["role"] in ("user", "system", "developer")
        if plain and found and found[-1].keys() == message.keys() and found[-1]["role"] == message["role"]:
            found[-1]["content"] += f"\n{message['content']}"
        else:
            found.append(dict(message))
    return found


def _up_to_end(text: str, content: str) -> str:
    """Return a rendered conversation up to the end of its last message.

    If the template trims messages, trailing spaces are dropped. Raises UsageError if ``text`` does not contain the
    whole last message.

    Args:
        text: the rendered conversation. `END_OF_MESSAGE` marks the end of the last message.
        content: the content of the last message.
    """
    end = text.rfind(END_OF_MESSAGE)
    if end < 0 or content.strip() not in text[:end]:
        raise UsageError("the chat template does not show the whole last message, so it cannot be continued")
    trims = not text.startswith(f"{END_OF_MESSAGE} ", end)
    return text[:end].rstrip() if trims else text[:end]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check messages in OpenAI's format, and return them in a normalized form.

    A returned message has ``role``, ``content`` as text, and optionally ``name``. An assistant message may also have
    ``tool_calls`` (see `minillm.text.tools.plain_calls`) and ``reasoning_content``. A tool message may also have
    ``tool_call_id``.

    A given ``content`` may also be None, which means empty text, or a list of text parts, which are joined by newlines.
    An assistant message's ``refusal`` is another part. ``thinking`` and ``reasoning`` are other names of
    ``reasoning_content``.

    Raises UsageError for an unknown role or key, or content that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        form = '{"role": "user", "content": "…"}'
        raise UsageError(f"a conversation is a list of {form}, not {type(messages).__name__}")
    if not messages:
        raise UsageError("the conversation is empty; give at least one message")
    plain = [_plain_message(message) for message in messages]
    if sum(map(len, texts_in(plain))) > _MAX_CHARACTERS:
        raise ContextLengthError(f"the conversation is longer than {_MAX_CHARACTERS:,} characters; shorten it")
    return plain


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f'a message is {{"role": "user", "content": "…"}}, not {type(message).__name__}')
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    role = message.get("role")
    if role == "assistant":  # clients send answers back as they received them
        if message.get("reasoning_content") is None and "reasoning" in message:  # vLLM's name
            message = {**message, "reasoning_content": message["reasoning"]}
        if message.get("refusal"):  # OpenAI's API returns it in place of the content
            content = message.get("content") or []
            parts = content if isinstance(content, list | tuple) else [content]
            message = {**message, "content": [*parts, message["refusal"]]}
        message = {key: value for key, value in message.items() if key not in ("reasoning", "parsed", "refusal")}
        message = {key: value for key, value in message.items() if key not in _EMPTY_KEYS or value not in (None, [])}
    known = _KEYS_OF.get(role, ()) if isinstance(role, str) else ()
    check_names(message, (*_KEYS, *known), "key of a message")
    if role not in ROLES:
        raise UsageError(f"unknown role {shown(role)}; known: {', '.join(ROLES)}")
    if "content" not in message and "tool_calls" not in message:
        raise UsageError("a message without content; give it as text")
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [] if content is None else [content]
    plain = {**message, "content": "\n".join(map(_text_of, parts))}
    for key in ("name", "tool_call_id", *_THOUGHTS):
        if not isinstance(plain.get(key, ""), str):
            raise UsageError(f"the {key} in a message must be text, not {shown(message[key])}")
    if thoughts := [plain.pop(key) for key in _THOUGHTS if key in plain]:
        plain["reasoning_content"] = thoughts[0]
    if "tool_calls" in plain:
        plain["tool_calls"] = plain_calls(plain["tool_calls"])
    return plain


def _text_of(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") in ("text", "refusal"):
        part = part.get(part["type"])
    if isinstance(part, Mapping):
        raise UsageError(f"a part of type {shown(part.get('type'))} in a message: only text is supported")
    if not isinstance(part, str):
        raise UsageError(f"the content of a message must be text, not {type(part).__name__}")
    return part
