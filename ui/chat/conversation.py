"""A conversation as data: a tree of turns with one visible path.

This module knows no widgets, no engine and no files.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minillm.errors import UsageError
from minillm.service.messages import TokenChoice
from minillm.text.safe import clean_line

LONGEST_TITLE = 60  # characters


@dataclass
class Candidate:
    """One of several answers to choose from.

    Only beams have a ``score`` and a ``logprob``. With `Settings.depths`, ``depth`` is the number of reasoning tokens
    after which this candidate answers. ``num_shared`` of the tokens were computed for another candidate.
    """

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    score: float | None = None
    logprob: float | None = None
    depth: int | None = None
    num_shared: int = 0
    tokens: list[TokenChoice] = field(default_factory=list)


@dataclass
class Answer:
    """An answer: the raw model output, and figures about it. Times are in seconds.

    ``finish_reason`` stays None during generation. Afterwards, it is the engine's "stop", "length" or "abort", or
    "lost" if the engine process ended. If there are ``candidates``, ``text`` is empty until one is accepted.
    """

    request_id: str
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0  # cached tokens that were read from disk
    disk_seconds: float = 0.0
    num_output_tokens: int = 0
    num_guessed_tokens: int = 0  # number of output tokens that were draft tokens
    time_to_first_token: float | None = None
    tokens_per_second: float = 0.0
    in_reasoning: bool = False  # the text begins inside the model's <think> section
    tokens: list[TokenChoice] = field(default_factory=list)  # the text's tokens with alternatives; not saved
    candidates: list[Candidate] = field(default_factory=list)  # empty when a candidate was accepted
    num_read_tokens: int = 0  # number of prompt tokens that are computed; not saved
    reading_left: float | None = None  # seconds until the whole prompt is computed, if known; not saved

    @property
    def num_context_tokens(self) -> int:
        """Return the number of tokens in the context: the prompt, and the answer or its longest candidate."""
        longest = max((candidate.num_tokens for candidate in self.candidates), default=self.num_output_tokens)
        return self.num_prompt_tokens + longest

    @property
    def num_known_tokens(self) -> int:
        """Return the number of computed tokens of the context.

        During prefill, these are the first tokens of the prompt. Afterwards, they are all tokens of prompt and answer.
        """
        return self.num_read_tokens if self.time_to_first_token is None else self.num_context_tokens

    @property
    def is_open(self) -> bool:
        """Return whether the answer is still being generated."""
        return self.finish_reason is None

    def take(self, chosen: Candidate) -> None:
        """Use a candidate as the answer, and drop the other candidates."""
        self.text, self.tokens, self.num_output_tokens = chosen.text, chosen.tokens, chosen.num_tokens
        self.finish_reason = chosen.finish_reason or self.finish_reason
        self.candidates = []


@dataclass(eq=False)
class Turn:
    """A question and its answer. ``children`` are the turns that follow it. Several children are branches."""

    question: str
    answer: Answer
    parent: Turn | None = None
    children: list[Turn] = field(default_factory=list)
    summary: str = ""  # shown to the model instead of all turns before this one
    notes: list[str] = field(default_factory=list)  # notes of the tour, shown after this turn


class Fork(NamedTuple):
    """The beginning of a new version of an answer: the answer's first tokens, then an alternative to its next token."""

    tokens: list[TokenChoice]  # the first tokens of the answer, then the chosen alternative

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True)
class Choice:
    """A choice of a candidate, with the data for undoing it."""

    turn: Turn
    before: Answer  # a copy of the answer with all candidates
    others: list[Turn]  # the branches created from the other candidates


def shown_title(title: str, question: str) -> str:
    """Return ``title`` for display, clean and on one line. If it is empty, use the first words of ``question``."""
    words = clean_line(title.strip() or question.strip().partition("\n\n")[0], 10 * LONGEST_TITLE)
    if len(words) <= LONGEST_TITLE:
        return words
    return (words[:LONGEST_TITLE].rpartition(" ")[0] or words[: LONGEST_TITLE - 1]) + " …"


@dataclass
class Conversation:
    """A tree of turns. An edited question adds a branch to it.

    The engine associates the conversation's cache blocks with ``conversation_id``.
    """

    conversation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    system: str = ""
    model: str = ""
    began: float = field(default_factory=time.time)
    first: list[Turn] = field(default_factory=list)  # turns without a parent
    leaf: Turn | None = None  # the last visible turn
    num_dropped: int = 0  # number of turns at the beginning of the path that the model no longer sees
    title: str = ""  # chosen by the user; not cleaned for a terminal
    # For branches made from candidates: the branch's request -> (request, index) of the candidate; not saved.
    origins: dict[str, tuple[str, int]] = field(default_factory=dict)
    shortened: dict[str, int] = field(default_factory=dict)  # request -> number of tokens removed by a later summary
    notes: list[str] = field(default_factory=list)  # notes of the tour, shown before the first turn
    is_trial: bool = False  # save the conversation only if the user continues after the first answer
    copy_id: str = ""  # the file's id, if another program has changed the file with the id ``conversation_id``
    file_version: tuple[int, ...] | None = None  # version of the file when it was last read or written
    choice: Choice | None = field(default=None, compare=False)  # the last candidate accepted; not saved
    # The last turn that was asked, and the leaf before it; not saved.
    _asked: tuple[Turn, Turn | None] | None = field(default=None, compare=False, repr=False)

    @property
    def file_id(self) -> str:
        """Return the id of the conversation's file."""
        return self.copy_id or self.conversation_id

    @property
    def is_worth_saving(self) -> bool:
        """Return whether to save the conversation.

        It must have a question. If `is_trial`, the user must also have continued after the first answer.
        """
        asked = self.first[0].question if self.first else ""
        return bool(self.first) and (
            not self.is_trial or any(turn.children or turn.question != asked for turn in self.first)
        )

    @property
    def num_known_tokens(self) -> int:
        """Return the number of computed tokens of the context, without the tokens that a summary has replaced."""
        if self.leaf is None:
            return 0
        answer = self.leaf.answer
        return max(0, answer.num_known_tokens - self.shortened.get(answer.request_id, 0))

    @property
    def shown_title(self) -> str:
        """Return the title for display, or the first words of the first question. Without a question, return ""."""
        return shown_title(self.title, self.first[0].question if self.first else "")

    @property
    def turns(self) -> list[Turn]:
        """Return the turns of the visible path, from the first one to `leaf`."""
        path = []
        turn = self.leaf
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    def all_turns(self) -> Iterator[Turn]:
        """Yield every turn of the tree, each before its children."""
        stack = self.first[::-1]
        while stack:
            turn = stack.pop()
            yield turn
            stack += turn.children[::-1]

    def siblings(self, turn: Turn) -> list[Turn]:
        """Return the branches that include ``turn``: all turns with the same parent."""
        return self.first if turn.parent is None else turn.parent.children

    def switch(self, turn: Turn, step: int) -> Turn:
        """Show the branch that is next to ``turn``: the following one (``step`` 1) or the previous one (-1).

        The visible path continues to the latest turn of this branch. Return the branch's first turn.
        """
        siblings = self.siblings(turn)
        chosen = siblings[(siblings.index(turn) + step) % len(siblings)]
        self.leaf = chosen
        while self.leaf.children:
            self.leaf = self.leaf.children[-1]
        self.num_dropped = 0
        return chosen

    def ask(self, question: str, instead_of: Turn | None = None) -> Answer:
        """Add a turn after the last visible turn, or as a branch next to ``instead_of``.

        Return the turn's answer, which is still empty.
        """
        parent = self.leaf if instead_of is None else instead_of.parent
        turn = Turn(question, Answer(self.new_request_id()), parent)
        self.siblings(turn).append(turn)
        self._asked = turn, self.leaf
        self.leaf = turn
        return turn.answer

    def accept(self, turn: Turn, index: int) -> None:
        """Use candidate ``index`` as the answer of ``turn``.

        Each other candidate with text becomes a branch next to ``turn``. `undo` reverses this.
        """
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
        self.choice = Choice(turn, before, [each for each in turns if each is not turn])

    def fork(self, turn: Turn, fork: Fork) -> Turn:
        """Add a branch next to ``turn``. Its answer begins with the fork's tokens and should then be continued."""
        answer = Answer(self.new_request_id(), fork.text, "abort", in_reasoning=turn.answer.in_reasoning)
        answer.tokens, answer.num_output_tokens = fork.tokens, len(fork.tokens)
        self.leaf = Turn(turn.question, answer, turn.parent)
        siblings = self.siblings(turn)
        siblings.insert(siblings.index(turn) + 1, self.leaf)
        return self.leaf

    def undo(self) -> Turn:
        """Undo the last choice of a candidate: restore all candidates. Return the turn to which the candidates belong.

        Raises:
            UsageError: no candidate was accepted. It is also raised if a branch that the choice created has been
                continued or is gone.
        """
        choice, self.choice = self.choice, None
        if choice is not None:
            turn, siblings = choice.turn, self.siblings(choice.turn)
            if not any(each.children or each not in siblings for each in (turn, *choice.others)):
                for other in choice.others:
                    siblings.remove(other)
                turn.answer, self.leaf = choice.before, turn
                return turn
        raise UsageError("there is no choice to undo; Alt+← → shows the other branches")

    def new_request_id(self) -> str:
        return f"{self.conversation_id}-{uuid.uuid4().hex[:8]}"

    def withdraw(self) -> str:
        """Remove the last turn and return its question. Show the turns that were visible before the question."""
        turn = self.leaf
        assert turn is not None
        siblings = self.siblings(turn)
        siblings.remove(turn)
        self.leaf = turn.parent
        if siblings:
            self.switch(siblings[-1], 0)
        if self._asked is not None and self._asked[0] is turn:
            self.leaf = self._asked[1]
        return turn.question

    @property
    def num_answers(self) -> int:
        """Return the number of turns in the visible path with a completed answer."""
        return sum(not turn.answer.is_open for turn in self.turns)

    @property
    def num_unsent(self) -> int:
        """Return the number of turns in the visible path that the model does not see: dropped or summarized turns."""
        summed_up = [number for number, turn in enumerate(self.turns) if turn.summary]
        return max([self.num_dropped, *summed_up])

    def messages(self, system: str = "", before: Turn | None = None) -> list[dict[str, str]]:
        """Return the part of the conversation that the model sees, as messages with alternating roles.

        The last answer is left out if it is still open. With ``before``, this turn and all later turns are left out.
        """
        messages = [{"role": "system", "content": system}] if system else []
        turns = self.turns[self.num_unsent :]
        if turns and turns[0].summary:
            messages.append({"role": "user", "content": "What have we said so far?"})
            messages.append({"role": "assistant", "content": turns[0].summary})
        for turn in turns if before is None else turns[: turns.index(before)]:
            messages.append({"role": "user", "content": turn.question})
            if not turn.answer.is_open:
                messages.append({"role": "assistant", "content": turn.answer.text})
        return messages

    def drop_oldest_half(self) -> bool:
        """Drop about half of the text that the model sees. Return False if only the last question is left.

        The next prompts then all begin with the same text, and find its blocks in the cache. If each question dropped
        one turn instead, the beginning would change every time.
        """
        self.num_dropped = self.num_unsent
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
        """Return a name for a request: ``turn 2``, or ``turn 2 · answer 3`` for the third branch at turn 2.

        Return None for a request of another conversation.
        """
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
