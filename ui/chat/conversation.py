"""A conversation as data: a tree of turns with one visible path. No widgets, no engine, no files."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minillm.service.messages import TokenChoice
from minillm.text.safe import clean_line

LONGEST_TITLE = 60  # characters


@dataclass
class Candidate:
    """One of several answers to choose from. Only beams have ``score`` and ``logprob``."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    score: float | None = None
    logprob: float | None = None
    tokens: list[TokenChoice] = field(default_factory=list)


@dataclass
class Answer:
    """The raw model output of an answer, and its figures. Times are in seconds.

    ``finish_reason`` is None during generation, then the engine's "stop", "length" or "abort", or "lost" if the engine
    process ended. With ``candidates``, ``text`` is empty until one is accepted.
    """

    request_id: str
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_guessed_tokens: int = 0  # output tokens that were draft tokens
    time_to_first_token: float | None = None
    tokens_per_second: float = 0.0
    in_reasoning: bool = False  # the text begins inside the model's <think> section
    tokens: list[TokenChoice] = field(default_factory=list)  # of the text; not saved
    candidates: list[Candidate] = field(default_factory=list)  # to choose from
    num_read_tokens: int = 0  # computed prompt tokens; not saved
    reading_left: float | None = None  # seconds until the prompt is computed, if known; not saved

    @property
    def num_context_tokens(self) -> int:
        longest = max((candidate.num_tokens for candidate in self.candidates), default=self.num_output_tokens)
        return self.num_prompt_tokens + longest

    @property
    def num_known_tokens(self) -> int:
        """Return how many tokens of the context are computed."""
        return self.num_read_tokens if self.time_to_first_token is None else self.num_context_tokens

    @property
    def is_open(self) -> bool:
        return self.finish_reason is None

    def take(self, chosen: Candidate) -> None:
        """Use a candidate as the answer."""
        self.text, self.tokens, self.num_output_tokens = chosen.text, chosen.tokens, chosen.num_tokens
        self.finish_reason = chosen.finish_reason or self.finish_reason
        self.candidates = []


@dataclass(eq=False)
class Turn:
    """A question and its answer. ``children`` are the turns that follow; several are branches."""

    question: str
    answer: Answer
    parent: Turn | None = None
    children: list[Turn] = field(default_factory=list)
    summary: str = ""  # shown to the model instead of all turns before this one
    notes: list[str] = field(default_factory=list)  # the tour's, shown after this turn


class Fork(NamedTuple):
    """Another continuation of an answer."""

    tokens: list[TokenChoice]  # the kept tokens, and the one chosen instead of the next

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True)
class Choice:
    """The choice of a candidate, with the data needed to undo it."""

    turn: Turn
    before: Answer  # with all candidates
    others: list[Turn]  # the branches made of the other candidates


def shown_title(title: str, question: str) -> str:
    """Return a title, or the first words of a first question if it is empty, clean and on one line."""
    words = clean_line(title.strip() or question.strip().partition("\n\n")[0], 10 * LONGEST_TITLE)
    if len(words) <= LONGEST_TITLE:
        return words
    return (words[:LONGEST_TITLE].rpartition(" ")[0] or words[: LONGEST_TITLE - 1]) + " …"


@dataclass
class Conversation:
    """The tree of turns. The engine keeps its blocks under ``conversation_id``. An edited question is a branch."""

    conversation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    system: str = ""
    model: str = ""
    began: float = field(default_factory=time.time)
    first: list[Turn] = field(default_factory=list)  # turns without a parent
    leaf: Turn | None = None  # the last visible turn
    num_dropped: int = 0  # oldest turns of the path that the model no longer sees
    title: str = ""  # given by the user; not cleaned for a terminal
    origins: dict[str, tuple[str, int]] = field(default_factory=dict)  # branch -> the candidate it was; not saved
    shortened: dict[str, int] = field(default_factory=dict)  # request -> tokens removed by a later summary
    notes: list[str] = field(default_factory=list)  # the tour's, shown before the first turn
    is_trial: bool = False  # saved only once the user continues after its first answer
    copy_id: str = ""  # of its file, if another program changed the one under ``conversation_id``
    file_version: tuple[int, ...] | None = None  # of its file, when last read or written

    @property
    def file_id(self) -> str:
        return self.copy_id or self.conversation_id

    @property
    def is_worth_saving(self) -> bool:
        """Return whether there is a question, and a trial was continued by the user."""
        asked = self.first[0].question if self.first else ""
        return bool(self.first) and (
            not self.is_trial or any(turn.children or turn.question != asked for turn in self.first)
        )

    @property
    def num_known_tokens(self) -> int:
        """Return the computed tokens of the context up to the last answer, less the tokens that a summary removed."""
        if self.leaf is None:
            return 0
        answer = self.leaf.answer
        return max(0, answer.num_known_tokens - self.shortened.get(answer.request_id, 0))

    @property
    def shown_title(self) -> str:
        """Return the title, or the first words of the first question, clean. Empty without a question."""
        return shown_title(self.title, self.first[0].question if self.first else "")

    @property
    def turns(self) -> list[Turn]:
        path = []
        turn = self.leaf
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    def all_turns(self) -> Iterator[Turn]:
        """Yield every turn, each before its children."""
        stack = self.first[::-1]
        while stack:
            turn = stack.pop()
            yield turn
            stack += turn.children[::-1]

    def siblings(self, turn: Turn) -> list[Turn]:
        """Return the branches at this place, including ``turn``."""
        return self.first if turn.parent is None else turn.parent.children

    def switch(self, turn: Turn, step: int) -> Turn:
        """Show the next (``step`` 1) or previous (-1) branch at the place of ``turn``, up to its latest turn."""
        siblings = self.siblings(turn)
        chosen = siblings[(siblings.index(turn) + step) % len(siblings)]
        self.leaf = chosen
        while self.leaf.children:
            self.leaf = self.leaf.children[-1]
        self.num_dropped = 0
        return chosen

    def ask(self, question: str, instead_of: Turn | None = None) -> Answer:
        """Add a turn after the last one, or as a branch next to ``instead_of``. Return its empty answer."""
        parent = self.leaf if instead_of is None else instead_of.parent
        turn = Turn(question, Answer(self.new_request_id()), parent)
        self.siblings(turn).append(turn)
        self.leaf = turn
        return turn.answer

    def accept(self, turn: Turn, index: int) -> Choice:
        """Use a candidate as the answer. Each other one that has text becomes a branch next to it."""
        before, siblings = replace(turn.answer), self.siblings(turn)
        turns = []
        for number, candidate in enumerate(before.candidates):
            if number == index:
                turn.answer.take(candidate)
                turns.append(turn)
            elif candidate.text.strip():
                answer = replace(before, request_id=self.new_request_id())
                answer.take(candidate)
                self.origins[answer.request_id] = (before.request_id, number)
                turns.append(Turn(turn.question, answer, turn.parent))
        at = siblings.index(turn)
        siblings[at : at + 1] = turns
        return Choice(turn, before, [each for each in turns if each is not turn])

    def fork(self, turn: Turn, fork: Fork) -> Turn:
        """Add a branch next to a turn, with an answer that begins with the fork's tokens and is to be continued."""
        answer = Answer(self.new_request_id(), fork.text, "abort", in_reasoning=turn.answer.in_reasoning)
        answer.tokens, answer.num_output_tokens = fork.tokens, len(fork.tokens)
        self.leaf = Turn(turn.question, answer, turn.parent)
        siblings = self.siblings(turn)
        siblings.insert(siblings.index(turn) + 1, self.leaf)
        return self.leaf

    def undo(self, choice: Choice) -> bool:
        """Restore all candidates of a choice. Return False if one of them has turns after it by now."""
        turn, siblings = choice.turn, self.siblings(choice.turn)
        if any(each.children or each not in siblings for each in (turn, *choice.others)):
            return False
        for other in choice.others:
            siblings.remove(other)
        turn.answer, self.leaf = choice.before, turn
        return True

    def new_request_id(self) -> str:
        return f"{self.conversation_id}-{uuid.uuid4().hex[:8]}"

    def withdraw(self) -> str:
        """Remove the last turn. Return its question."""
        turn = self.leaf
        assert turn is not None
        siblings = self.siblings(turn)
        siblings.remove(turn)
        self.leaf = turn.parent
        if siblings:
            self.switch(siblings[-1], 0)
        return turn.question

    @property
    def num_answers(self) -> int:
        """Return how many turns of the path have ended answers."""
        return sum(not turn.answer.is_open for turn in self.turns)

    @property
    def num_untold(self) -> int:
        """Return how many turns of the path the model does not see: they were dropped or summarized."""
        summed_up = [number for number, turn in enumerate(self.turns) if turn.summary]
        return max([self.num_dropped, *summed_up])

    def messages(self, system: str = "", before: Turn | None = None) -> list[dict[str, str]]:
        """Return the messages for the engine. Roles alternate; the open answer is the requested one.

        ``before``: the first turn to leave out, with all later ones.
        """
        messages = [{"role": "system", "content": system}] if system else []
        turns = self.turns[self.num_untold :]
        if turns and turns[0].summary:
            messages.append({"role": "user", "content": "What have we said so far?"})
            messages.append({"role": "assistant", "content": turns[0].summary})
        for turn in turns if before is None else turns[: turns.index(before)]:
            messages.append({"role": "user", "content": turn.question})
            if not turn.answer.is_open:
                messages.append({"role": "assistant", "content": turn.answer.text})
        return messages

    def drop_oldest_half(self) -> bool:
        """Drop about half of what the model sees. Return False if only the last question is left.

        After that, the next prompts begin alike and find their blocks. Dropping one turn per question would prevent
        that.
        """
        self.num_dropped = self.num_untold
        lengths = [len(turn.question) + len(turn.answer.text) for turn in self.turns[self.num_dropped :]]
        if len(lengths) < 2:
            return False
        half = sum(lengths) / 2
        while True:
            lengths.pop(0)
            self.num_dropped += 1
            if len(lengths) == 1 or sum(lengths) <= half:
                return True

    def name_of(self, request_id: str) -> str | None:
        """Return ``turn 2``, or ``turn 2 · answer 3`` for its third branch; None for another conversation's request."""
        if not request_id.startswith(self.conversation_id):
            return None
        depths: dict[int, int] = {}
        seen: dict[int, int] = {}
        for turn in self.all_turns():
            depth = depths[id(turn)] = 1 if turn.parent is None else depths[id(turn.parent)] + 1
            seen[depth] = seen.get(depth, 0) + 1
            if turn.answer.request_id == request_id:
                number = seen[depth]
                return f"turn {depth}" + ("" if number == 1 else f" · answer {number}")
        return None
