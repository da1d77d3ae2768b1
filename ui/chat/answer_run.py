"""Generate an answer: send requests for it to the engine, and apply the engine's events to the answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from minillm.service import messages
from minillm.ui.chat.answer_view import AnswerView
from minillm.ui.chat.candidates import CandidatesView
from minillm.ui.chat.conversation import Answer, Conversation, Turn
from minillm.ui.chat.files import holds_file
from minillm.ui.chat.transcript import Transcript
from minillm.ui.numbers import count, plural
from minillm.ui.settings import Settings

_LEAST_TIMED = 0.3  # a rate is shown after this many seconds of generation
_MIN_CONTEXT_LEFT = 256  # if the context has fewer tokens left for an answer, the oldest turns are dropped


class Ending(NamedTuple):
    """The end of an answer. ``reason`` becomes `Answer.finish_reason`. If it is "lost", ``error`` says why."""

    reason: str
    error: str = ""


@dataclass
class AnswerRun:
    """An answer in progress.

    Call `ask` or `go_on` first. Pass each event to `take` until it returns an ending, then call `end`.
    """

    turn: Turn
    conversation: Conversation
    settings: Settings
    transcript: Transcript
    send: Callable[[messages.Command], None]
    max_model_len: int
    owner: str = ""  # name of the conversation's blocks on disk; empty: keep none on disk
    is_stopping: bool = False
    _superseded: str = ""  # for a continuation: the request that generated the text so far
    _num_before: int = 0  # for a continuation: the number of tokens in the text so far
    _to_accept: tuple[int, str] | None = None  # index and text of the candidate to accept when the answer has ended
    _first_token_at: float = 0.0
    _num_ended: int = 0  # number of candidates with a `Finished` event

    def __post_init__(self) -> None:
        self._num_dropped = self.conversation.num_dropped  # number of turns that were dropped before this answer
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds since the answer was requested."""
        return time.monotonic() - self._began

    @property
    def answer(self) -> Answer:
        return self.turn.answer

    @property
    def view(self) -> AnswerView | CandidatesView | None:
        shown = self.transcript.view_of(self.turn)
        return None if shown is None else shown.answer_view

    def ask(self, min_context_left: int = _MIN_CONTEXT_LEFT) -> None:
        """Request an answer to the conversation.

        ``min_context_left``: the minimum number of tokens that the context must have left for the answer.
        """
        longest = int(self.settings.sampling.get("max_tokens", min_context_left))
        min_context_left = max(1, min(min_context_left, self.max_model_len // 8, longest))
        history, params = self.conversation.messages(self.settings.system), self.settings.request_params()
        self._generate(history, params, min_context_left=min_context_left)

    def go_on(self) -> None:
        """Request a continuation of an answer that had ended."""
        history, answer = self.conversation.messages(self.settings.system), self.answer
        self._superseded, answer.request_id = answer.request_id, self.conversation.new_request_id()
        self._num_before = answer.num_output_tokens
        answer.finish_reason = answer.time_to_first_token = None
        # Only one continuation is requested, even if the settings are for several candidates.
        self._generate(history, self.settings.params_to_continue(), continues=True)

    def _generate(self, history: list[dict[str, str]], params: dict[str, Any], **how: Any) -> None:
        view, request_id, thinks = self.view, self.answer.request_id, self.settings.thinks
        if view is not None:
            view.update_summary()
        with_file = [n for n, each in enumerate(history, 1) if each["role"] == "user" and holds_file(each["content"])]
        how["num_pinned"] = max(with_file, default=0)
        how["owner"] = self.owner
        self.send(
            messages.Generate(request_id, self.conversation.conversation_id, history, params, thinks=thinks, **how)
        )

    def stop(self, chosen: int | None = None) -> None:
        """Stop the answer. ``chosen``: index of a candidate to accept once the answer has stopped."""
        if chosen is not None:
            self._to_accept = chosen, self.answer.candidates[chosen].text
        self.is_stopping = True
        self.send(messages.Abort(self.answer.request_id))

    async def take(self, event: messages.Event) -> Ending | None:
        """Handle an event of this answer. Return the ending if the event ends the answer, else None."""
        match event:
            case messages.Reading():
                self._read(event)
            case messages.Started():
                await self._start(event)
            case messages.TextDelta():
                self._add(event)
            case messages.BeamsChanged(_, beams):
                self._show_beams(beams)
            case messages.Finished():
                return self._finish(event)
            case messages.RequestFailed(_, error):
                return Ending("lost", error)
            case messages.ContextFull():
                return self._ask_without_oldest(event)
        return None

    def _read(self, event: messages.Reading) -> None:
        answer, view = self.answer, self.view
        answer.num_read_tokens, answer.reading_left = event.num_computed_tokens, event.seconds_left
        answer.num_prompt_tokens = event.num_prompt_tokens
        if view is not None:
            view.update_summary()

    async def _start(self, event: messages.Started) -> None:
        answer, view = self.answer, self.view
        self._first_token_at = time.monotonic()
        answer.num_prompt_tokens = max(0, event.num_prompt_tokens - self._num_before)
        answer.num_cached_tokens = min(event.num_cached_tokens, answer.num_prompt_tokens)
        answer.time_to_first_token = event.time_to_first_token
        answer.num_disk_tokens, answer.disk_seconds = event.num_disk_tokens, event.disk_seconds
        if not answer.text:
            answer.in_reasoning = event.in_reasoning
            if isinstance(view, AnswerView):
                view.begin(event.in_reasoning)
        dropped = self.conversation.num_dropped
        if dropped > self._num_dropped:
            oldest = f"the oldest {plural(dropped, 'turn')}"
            await self.transcript.add_note(f"the context is full: the model no longer sees {oldest}", "warning")

    def _add(self, event: messages.TextDelta) -> None:
        answer, view = self.answer, self.view
        if answer.candidates:
            candidate = answer.candidates[event.index]
            candidate.text += event.text
            candidate.num_tokens += event.num_tokens
            candidate.num_shared += event.num_shared
            candidate.tokens += event.tokens
        else:
            answer.text += event.text
            answer.tokens += event.tokens
            if isinstance(view, AnswerView):
                view.add(event.text)
        answer.num_output_tokens += event.num_tokens - event.num_shared

    def _show_beams(self, beams: list[messages.BeamView]) -> None:
        for candidate, beam in zip(self.answer.candidates, beams, strict=False):
            candidate.text, candidate.num_tokens = beam.text, beam.num_tokens
            candidate.score, candidate.logprob = beam.score, beam.logprob
            candidate.finish_reason = "stop" if beam.finished else None
        longest = max((beam.num_tokens for beam in beams), default=0)
        self.answer.num_output_tokens = max(self.answer.num_output_tokens, longest)

    def _finish(self, event: messages.Finished) -> Ending | None:
        answer = self.answer
        if not answer.candidates:
            answer.tokens_per_second = event.tokens_per_second
            answer.num_output_tokens = self._num_before + event.num_output_tokens
            answer.num_guessed_tokens += event.num_guessed_tokens
            return Ending(event.finish_reason)
        answer.candidates[event.index].finish_reason = event.finish_reason
        self._num_ended += 1
        if self._num_ended < len(answer.candidates):
            return None
        return Ending("abort" if any(each.finish_reason == "abort" for each in answer.candidates) else "stop")

    def _ask_without_oldest(self, event: messages.ContextFull) -> Ending | None:
        """Ask again without the oldest turns, because the context is full.

        Return an ending only if asking again is impossible: the last question alone does not fit, or the answer is a
        continuation.
        """
        if self._superseded:
            return Ending("lost", "the context is full: this answer cannot continue")
        if self.conversation.drop_oldest_half():
            self.ask()
        elif event.num_tokens + 1 < event.max_model_len:
            self.ask(min_context_left=1)
        else:
            size = f"the prompt with your question has {plural(event.num_tokens, 'token')}"
            limit = f"the context holds {count(event.max_model_len)}"
            return Ending("lost", f"{size}, but {limit}: shorten it, or choose a model with a longer context (F2)")
        return None

    async def draw(self, lines_ahead: int) -> None:
        """Show the text that was added since the last call.

        ``lines_ahead`` is the number of blank lines that the last paragraph reserves when it grows.
        """
        view, answer = self.view, self.answer
        elapsed = time.monotonic() - self._first_token_at
        new = answer.num_output_tokens - self._num_before
        if new > 1 and elapsed > _LEAST_TIMED and answer.is_open:
            answer.tokens_per_second = (new - 1) / elapsed
        if view is not None:
            await view.flush(lines_ahead)

    async def end(self, reason: str) -> bool:
        """Close the answer.

        Return False if the answer was stopped or lost before its first word. The caller then removes the turn.
        """
        view, answer = self.view, self.answer
        answer.finish_reason = reason
        if self._superseded:
            self.send(messages.Drop(self._superseded))
        said = answer.text + "".join(candidate.text for candidate in answer.candidates)
        if reason != "stop" and not said.strip():
            return False
        if view is not None:
            await view.end()
        return True

    @property
    def chosen(self) -> int | None:
        """Return the current index of the candidate that was passed to `stop`, or None.

        Beams may have been reordered since `stop`, so the candidate is found by its text.
        """
        if self._to_accept is None:
            return None
        index, text = self._to_accept
        order = [index, *range(len(self.answer.candidates))]
        return next((i for i in order if self.answer.candidates[i].text.startswith(text)), index)
