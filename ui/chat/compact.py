"""``/compact``: the model summarizes the older half of a conversation, and sees the summary instead from then on."""

from collections.abc import Callable
from dataclasses import dataclass

from minillm.errors import UsageError
from minillm.service import messages
from minillm.text.reasoning import split_reasoning
from minillm.ui.chat.conversation import Conversation, Turn
from minillm.ui.numbers import count, plural

_REQUEST = (
    "Sum up our conversation so far, for yourself: facts, names, numbers, decisions and open questions. "
    "Write plain sentences, and nothing else."
)
_LONGEST = 400  # maximum tokens of a summary
_SUMMARY_PARAMS = {"temperature": 0.0, "max_tokens": _LONGEST, "repetition_penalty": 1.1}


@dataclass
class Compaction:
    """A running request for a summary of the conversation's older half.

    Call `begin`. Pass each event to `take` until it returns True, then call `finish`.
    """

    conversation: Conversation
    stays: Turn  # the first turn that stays: the summary replaces the turns before it
    request_id: str
    send: Callable[[messages.Command], None]
    text: str = ""
    num_tokens: int = 0
    is_stopped: bool = False
    error: str = ""

    @classmethod
    def begin(cls, conversation: Conversation, system: str, send: Callable[[messages.Command], None]) -> "Compaction":
        """Request a summary of the older half of the conversation.

        Raises:
            UsageError: the model sees fewer than two turns.
        """
        stays = second_half(conversation)
        history = [*conversation.messages(system, before=stays), {"role": "user", "content": _REQUEST}]
        compaction = cls(conversation, stays, conversation.new_request_id(), send)
        name, params, left = conversation.conversation_id, dict(_SUMMARY_PARAMS), _LONGEST // 4
        send(messages.Generate(compaction.request_id, name, history, params, thinks=False, min_context_left=left))
        return compaction

    def stop(self) -> None:
        self.is_stopped = True
        self.send(messages.Abort(self.request_id))

    def take(self, event: messages.Event) -> bool:
        """Handle an event. Return True if it is the last event of this request."""
        if getattr(event, "request_id", None) != self.request_id:
            return False
        match event:
            case messages.TextDelta(text=text, num_tokens=num_tokens):
                self.text += text
                self.num_tokens += num_tokens
                return False
            case messages.Finished():
                self.is_stopped = self.is_stopped or event.finish_reason == "abort"
            case messages.RequestFailed():
                self.error = event.error
            case messages.ContextFull():
                self.error = f"the older half alone has {count(event.num_tokens)} tokens, too many for the context"
            case _:
                return False
        return True

    def finish(self) -> str:
        """Store the summary in the conversation. Return a message for the user.

        Raises:
            UsageError: there is no summary. The message says why.
        """
        self.send(messages.Drop(self.request_id))
        summary = split_reasoning(self.text)[1].strip()
        if self.error or self.is_stopped or not summary:
            reason = self.error or ("it was stopped" if self.is_stopped else "the model wrote none")
            raise UsageError(f"there is no summary: {reason}; nothing has changed")
        turns = self.conversation.turns
        older = turns[: turns.index(self.stays)]
        came_back = older[-1].answer.num_context_tokens - self.num_tokens
        self.stays.summary = summary
        for turn in turns:  # free their blocks, which begin with text that the model no longer sees
            self.send(messages.Drop(turn.answer.request_id))
        which = "the first turn" if len(older) == 1 else f"the first {len(older)} turns"
        self.conversation.shortened = {turns[-1].answer.request_id: came_back}
        words = f"the model now sees {which} as a summary"
        if came_back > 0:
            words += f", which frees about {plural(came_back, 'token')}"
        return f"{words}; /compact undo removes it. Summary: {summary}"


def second_half(conversation: Conversation) -> Turn:
    """Return the first turn of the newer half of the turns that the model sees.

    Raises:
        UsageError: there are fewer than two turns.
    """
    seen = conversation.turns[conversation.num_unsent :]
    lengths = [len(turn.question) + len(turn.answer.text) for turn in seen]
    if len(seen) < 2:
        raise UsageError("there is too little to summarize: the last turn always stays")
    at = 1
    while at < len(seen) - 1 and 2 * sum(lengths[:at]) < sum(lengths):
        at += 1
    return seen[at]


def undo(conversation: Conversation) -> None:
    """Remove the last summary of the visible branch, so that the model sees the summarized turns again.

    Raises:
        UsageError: there is no summary in this branch.
    """
    turn = next((turn for turn in reversed(conversation.turns) if turn.summary), None)
    if turn is None:
        raise UsageError("there is no summary here: /compact makes one")
    turn.summary = ""
    conversation.shortened = {}
