"""The conversation as data: what was said, in order. No widget, no engine."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass
class Answer:
    """What the model said, as it said it, and how it went. ``finish_reason`` is None while it goes on.

    ``finish_reason`` is "stop", "length" or "abort" as the engine has it, or "lost" where the engine's process ended.
    Times are in seconds.
    """

    request_id: str
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    time_to_first_token: float | None = None
    tokens_per_second: float = 0.0

    @property
    def num_context_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass
class Turn:
    """A question and its answer."""

    question: str
    answer: Answer


@dataclass
class Conversation:
    """The turns so far. ``conversation_id`` is what the engine keeps its blocks under."""

    conversation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    turns: list[Turn] = field(default_factory=list)

    def ask(self, question: str) -> Answer:
        """A new turn; returns its answer, still empty."""
        answer = Answer(request_id=f"{self.conversation_id}-{uuid.uuid4().hex[:8]}")
        self.turns.append(Turn(question, answer))
        return answer

    def withdraw(self) -> str:
        """Take the last turn back; returns its question."""
        return self.turns.pop().question

    @property
    def open_answer(self) -> Answer | None:
        """The answer that is still being given."""
        if self.turns and self.turns[-1].answer.finish_reason is None:
            return self.turns[-1].answer
        return None

    def messages(self, system: str = "") -> list[dict[str, str]]:
        """What the engine gets: roles alternate, and the open answer is what it is asked for."""
        messages = [{"role": "system", "content": system}] if system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            if turn.answer.finish_reason is not None:
                messages.append({"role": "assistant", "content": turn.answer.text})
        return messages
