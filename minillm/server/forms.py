"""How completions look in chats and in plain completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm.server.answers import Json, chat_logprobs, extras, prompt_entry, text_logprobs
from minillm.server.engine_process import Answer
from minillm.server.messages import Completion, Text


@dataclass
class ChatForm:
    """Messages of an assistant."""

    has_logprobs: bool

    def first(self, number: int, index: int, answer: Answer) -> Json | None:
        return _choice(index, delta={"role": "assistant", "content": ""})

    def piece(self, number: int, text: Text) -> Json | None:
        delta = {"content": text.text} if text.text else {}
        if not (delta or text.finish_reason or text.token_ids or (self.has_logprobs and text.tokens)):
            return None
        found = _choice(text.index, delta=delta, reason=text.finish_reason)
        if self.has_logprobs and text.tokens:
            found["logprobs"] = chat_logprobs(text.tokens)
        return with_ids(found, text)

    def whole(self, number: int, completions: list[Completion], answer: Answer) -> list[Json]:
        return [self._whole(each) for each in completions]

    def _whole(self, each: Completion) -> Json:
        message = {"role": "assistant", "content": each.text, "refusal": None}
        logprobs = chat_logprobs(each.tokens) if self.has_logprobs else None
        found = {"index": each.index, "message": message, "logprobs": logprobs, "finish_reason": each.finish_reason}
        return with_ids({**found, **extras(each)}, each)


@dataclass
class TextForm:
    """Texts, and their prompts before them where that is asked for."""

    n: int  # answers to each prompt; those to the next prompt have the numbers behind
    echo: bool
    has_logprobs: bool
    prompt_logprobs: bool = False

    def first(self, number: int, index: int, answer: Answer) -> Json | None:
        if not self.echo:
            return None
        found = self._choice(number, index, self._prompt_of(answer))
        if self.has_logprobs and answer.began is not None:
            found["logprobs"] = text_logprobs(answer.began.prompt_tokens)
        return found

    def piece(self, number: int, text: Text) -> Json | None:
        if not (text.text or text.finish_reason or text.token_ids or (self.has_logprobs and text.tokens)):
            return None
        found = self._choice(number, text.index, text.text, text.finish_reason)
        if self.has_logprobs:
            found["logprobs"] = text_logprobs(text.tokens)
        return with_ids(found, text)

    def whole(self, number: int, completions: list[Completion], answer: Answer) -> list[Json]:
        best = completions
        if len(completions) > self.n:  # best_of: the most probable ones, by token
            best = sorted(completions, key=lambda each: -(each.cumulative_logprob or 0.0) / max(1, each.num_tokens))
        choices = []
        for index, each in enumerate(best[: self.n]):
            prompt = self._prompt_of(answer)
            found = self._choice(number, index, prompt + each.text, each.finish_reason)
            before = answer.began.prompt_tokens if answer.began is not None else []
            if self.has_logprobs:
                found["logprobs"] = text_logprobs([*(before if self.echo else ()), *each.tokens])
            if self.prompt_logprobs:
                found["prompt_logprobs"] = [prompt_entry(token) for token in before]
            choices.append(with_ids({**found, **extras(each)}, each))
        return choices

    def _prompt_of(self, answer: Answer) -> str:
        return answer.began.prompt_text if self.echo and answer.began is not None else ""

    def _choice(self, number: int, index: int, text: str, reason: str | None = None) -> Json:
        return {"index": number * self.n + index, "text": text, "logprobs": None, "finish_reason": reason}


def with_ids(choice: Json, of: Text | Completion) -> Json:
    """The choice, with its token ids where they were asked for."""
    return {**choice, "token_ids": of.token_ids} if of.token_ids else choice


def _choice(index: int, *, delta: dict[str, Any], reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
