"""What a request knows in order to guess at its next tokens: how many, and where they are read."""

from collections import Counter
from dataclasses import dataclass

from minillm.sequence import Chunk, Sequence, SequenceGroup
from minillm.speculation.lookup import Occurrences, Source
from minillm.speculation.pace import DraftPace, LookupPace, Pace, Price

_RESUMED = 3  # tokens that are guessed where a text may go on with what it has parted from


@dataclass(slots=True, eq=False)
class DraftChunk(Chunk):
    """A sequence's last token and draft tokens after it, each of which gives a row of logits.

    Attributes:
        proposed: empty until a draft model has proposed tokens.
    """

    proposed: tuple[int, ...] = ()

    @property
    def draft(self) -> tuple[int, ...]:
        """The draft tokens that have room in the step."""
        return self.proposed[: self.optional]

    @property
    def token_ids(self) -> list[int]:
        return [self.sequence.token_ids[-1], *self.draft]

    @property
    def num_logits(self) -> int:
        return 1 + len(self.draft)


class Guesses:
    """What a group knows in order to guess: how many tokens a draft model shall guess for each of its sequences."""

    def __init__(self, price: Price) -> None:
        self.price = price
        self.works = True  # until guessing has failed
        self.num_accepted: Counter[int] = Counter()  # draft tokens, by the completion's index
        self._paces: dict[int, Pace] = {}  # by the completion's index

    def pace(self, sequence: Sequence) -> Pace:
        if sequence.index not in self._paces:
            self._paces[sequence.index] = self._new_pace()
        return self._paces[sequence.index]

    def chunk(self, group: SequenceGroup, sequence: Sequence, most: int) -> DraftChunk | None:
        """A sequence's last token and at most so many guesses behind it, if there are any."""
        # Behind the guesses one more token is drawn.
        count = min(self.pace(sequence).count, most, group.max_tokens - sequence.num_output_tokens - 1)
        return self._guessed(group, sequence, count) if count > 0 else None

    def expects(self, group: SequenceGroup, sequence: Sequence) -> bool:
        """Whether there may be guesses behind a token of a sequence that the host does not know yet."""
        return True

    def learn(self, chunk: DraftChunk, num_right: int) -> None:
        """Learn from a step whose first ``num_right`` guesses were right."""
        self.pace(chunk.sequence).judge(len(chunk.draft), num_right)

    def _new_pace(self) -> Pace:
        return DraftPace(self.price)

    def _guessed(self, group: SequenceGroup, sequence: Sequence, count: int) -> DraftChunk | None:
        return DraftChunk(group, sequence, 1, True, optional=count)


class Lookups(Guesses):
    """The same where guesses are looked up in the texts of the group's sequences.

    Guesses behind a token that is not known yet are expected where its text has a source without that token, too. So a
    text that repeats nothing never waits for a lookup, and one that begins to repeat something is guessed a token later
    than it could be.
    """

    def __init__(self, price: Price) -> None:
        super().__init__(price)
        self._occurrences = Occurrences()
        self._noted: dict[int, int] = {}  # tokens of each completion that are in the index
        self._sources: dict[int, Source] = {}  # of each completion's latest guesses
        self._waiting: set[int] = set()  # completions whose next step waits for guesses

    def expects(self, group: SequenceGroup, sequence: Sequence) -> bool:
        if self._source(group, sequence) is None and self._parted(sequence) is None:
            return False
        self._waiting.add(sequence.index)
        return True

    def learn(self, chunk: DraftChunk, num_right: int) -> None:
        super().learn(chunk, num_right)
        if num_right < len(chunk.draft):
            self._sources[chunk.sequence.index].part(num_right)
        else:
            self._sources.pop(chunk.sequence.index, None)

    def _new_pace(self) -> Pace:
        return LookupPace(self.price)

    def _guessed(self, group: SequenceGroup, sequence: Sequence, count: int) -> DraftChunk | None:
        source = self._source(group, sequence)
        if source is None and (source := self._parted(sequence)) is not None:
            source.num_tries, count = source.num_tries + 1, min(count, _RESUMED)
        found = () if source is None else source.tokens(count, sequence.token_ids)
        waited = sequence.index in self._waiting
        self._waiting.discard(sequence.index)
        if source is None or not found:
            if waited:
                self.pace(sequence).judge(0, 0)
            return None
        self._sources[sequence.index] = source
        return DraftChunk(group, sequence, 1, True, optional=len(found), proposed=found)

    def _source(self, group: SequenceGroup, sequence: Sequence) -> Source | None:
        """Where the last tokens of a sequence occurred before."""
        for each in group.sequences:  # all have the same prompt: it is noted once
            first = self._noted.get(each.index, each.num_prompt_tokens if self._noted else 0)
            self._noted[each.index] = end = len(each.token_ids) - 1  # nothing has followed the last token yet
            self._occurrences.add(each.token_ids, first, end)
        return self._occurrences.source(sequence.token_ids)

    def _parted(self, sequence: Sequence) -> Source | None:
        """What a sequence has parted from, if it may go on with it now."""
        source, pace = self._sources.get(sequence.index), self.pace(sequence)
        assert isinstance(pace, LookupPace)
        return source if source is not None and pace.resumes(source.num_tries) else None


def num_accepted(group: SequenceGroup, index: int) -> int:
    """Return how many tokens of a group's completion were draft tokens."""
    return group.state.num_accepted[index] if isinstance(group.state, Guesses) else 0
