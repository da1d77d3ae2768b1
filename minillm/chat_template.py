"""Chat templates: a conversation to the text that the model was trained on.

Templates come with the model and are code. They run in a process of their own: see `minillm.template_worker`.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from minillm.errors import UsageError, WeightsError
from minillm.text import clean_line

ROLES = ("system", "user", "assistant", "tool")
_SECONDS = 5.0  # to render; the slowest template we know takes 20 ms
_END_MARK = "\ufdd1"  # a noncharacter: where the last message's content ends, see `render`


class ChatTemplate:
    """A Jinja template and the process that renders it, started when it is first needed.

    Args:
        source: the template.
        variables: what it may use besides the messages: ``bos_token`` and the like.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as text.

        Args:
            add_generation_prompt: end with what begins an answer.
            continue_final_message: end inside the last message, so that generation goes on with it.

        Raises:
            UsageError: a message that no template knows, or one that this template refuses.
            WeightsError: the template is broken, or takes too long, too much memory or too much text.
        """
        check_messages(messages)
        rendered_messages = [dict(message) for message in messages]
        if continue_final_message:
            rendered_messages[-1]["content"] += _END_MARK
        size = sum(len(message["content"]) for message in messages)
        request = {
            "template": self.source,
            "variables": {
                **self._variables,
                "messages": rendered_messages,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                "tools": None,
                "documents": None,
            },
            "limit": 4 * size + (1 << 18),
        }
        with self._lock:
            answer = self._ask(json.dumps(request).encode() + b"\n")
        if "error" in answer:
            raise UsageError(f"the model's chat template: {clean_line(str(answer['error']), 300)}")
        text = str(answer["text"])
        if continue_final_message:
            end = text.rfind(_END_MARK)
            if end < 0:
                raise UsageError("the model's chat template does not show the last message, so it cannot be continued")
            text = text[:end]
        return text

    def _ask(self, request: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        writer = threading.Thread(target=_write, args=(process.stdin, request), daemon=True)
        writer.start()  # a pipe holds 64 kB; the other side may be busy with something else than reading
        line, deadline = b"", time.monotonic() + _SECONDS
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([process.stdout], [], [], left)[0]
            chunk = process.stdout.read1(1 << 20) if ready else b""  # type: ignore[attr-defined]
            if not chunk:
                _end(process)
                self._process = None
                reason = "crashed" if ready else f"takes more than {_SECONDS:.0f} seconds"
                raise WeightsError(f"the model's chat template {reason}; the model cannot chat")
            line += chunk
        writer.join()
        return json.loads(line)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "minillm.template_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _write(stream: Any, data: bytes) -> None:
    with contextlib.suppress(OSError):
        stream.write(data)
        stream.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
    process.wait()


def check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    """Raise UsageError unless these are messages: known roles, content that is text."""
    if not messages:
        raise UsageError("the conversation is empty; give at least one message")
    for message in messages:
        if message.get("role") not in ROLES:
            raise UsageError(f"unknown role {clean_line(repr(message.get('role')))}; known: {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UsageError(f"the content of a message must be text, not {type(message.get('content')).__name__}")
