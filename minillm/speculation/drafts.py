"""Draft tokens of a request: how many to propose, and where n-gram lookup finds them."""

from collections import Counter
from dataclasses import dataclass

from minillm.sequence import Chunk, Sequence, SequenceGroup
from minillm.speculation.draft_length import DraftCosts, DraftLength, LookupDraftLength, ModelDraftLength
from minillm.speculation.lookup import Occurrences, Source

_RESUMED = 3  # draft tokens to try when a text may return to the source that it diverged from


@dataclass(slots=True, eq=False)
class DraftChunk(Chunk):
    """A sequence's last token and the draft tokens after it. Each of these tokens has a row of logits.

    Attributes:
        proposed: all proposed draft tokens; empty until a draft model has proposed some.
    """

    proposed: tuple[int, ...] = ()

    @property
    def draft(self) -> tuple[int, ...]:
        """The draft tokens that the scheduler granted for the step."""
        return self.proposed[: self.optional]

    @property
    def token_ids(self) -> list[int]:
        return [self.sequence.token_ids[-1], *self.draft]

    @property
    def num_logits(self) -> int:
        return 1 + len(self.draft)


class Drafts:
    """Decides how many tokens a draft model proposes for each sequence of a group."""

    def __init__(self, costs: DraftCosts) -> None:
        self.costs = costs
        self.works = True  # until proposing has failed
        self.num_accepted: Counter[int] = Counter()  # draft tokens, by the completion's index
        self._draft_lengths: dict[int, DraftLength] = {}  # by the completion's index

    def draft_length(self, sequence: Sequence) -> DraftLength:
        if sequence.index not in self._draft_lengths:
            self._draft_lengths[sequence.index] = self._new_draft_length()
        return self._draft_lengths[sequence.index]

    def chunk(self, group: SequenceGroup, sequence: Sequence, most: int) -> DraftChunk | None:
        """Return a chunk of a sequence's last token and up to ``most`` draft tokens, or None if there are no drafts."""
        # One more token is drawn after the draft tokens.
        count = min(self.draft_length(sequence).count, most, group.max_tokens - sequence.num_output_tokens - 1)
        return self._propose(group, sequence, count) if count > 0 else None

    def expects(self, group: SequenceGroup, sequence: Sequence) -> bool:
        """Return whether draft tokens are expected after a sequence's pending token.

        If so, the next step is not launched until the CPU knows the pending token.
        """
        return True

    def learn(self, chunk: DraftChunk, num_accepted: int) -> None:
        """Adapt the number of draft tokens to propose. The last step accepted ``num_accepted`` draft tokens of
        ``chunk``.
        """
        self.draft_length(chunk.sequence).update(len(chunk.draft), num_accepted)

    def _new_draft_length(self) -> DraftLength:
        return ModelDraftLength(self.costs)

    def _propose(self, group: SequenceGroup, sequence: Sequence, count: int) -> DraftChunk | None:
        return DraftChunk(group, sequence, 1, True, optional=count)


class LookupDrafts(Drafts):
    """Finds draft tokens by n-gram lookup in the texts of the group's sequences.

    Draft tokens after a pending token are expected only if the text before that token repeats an earlier passage (the
    source of the drafts). So a text without repetitions never waits for a lookup. But the first draft of a repetition
    comes one token late.
    """

    def __init__(self, costs: DraftCosts) -> None:
        super().__init__(costs)
        self._occurrences = Occurrences()
        self._noted: dict[int, int] = {}  # number of tokens of each completion that are in the index
        self._sources: dict[int, Source] = {}  # of each completion's latest draft tokens
        self._waiting: set[int] = set()  # completions that wait for draft tokens before their next step

    def expects(self, group: SequenceGroup, sequence: Sequence) -> bool:
        if self._source(group, sequence) is None and self._parted(sequence) is None:
            return False
        self._waiting.add(sequence.index)
        return True

    def learn(self, chunk: DraftChunk, num_accepted: int) -> None:
        super().learn(chunk, num_accepted)
        if num_accepted < len(chunk.draft):
            self._sources[chunk.sequence.index].part(num_accepted)
        else:
            self._sources.pop(chunk.sequence.index, None)

    def _new_draft_length(self) -> DraftLength:
        return LookupDraftLength(self.costs)

    def _propose(self, group: SequenceGroup, sequence: Sequence, count: int) -> DraftChunk | None:
        source = self._source(group, sequence)
        if source is None and (source := self._parted(sequence)) is not None:
            source.num_tries, count = source.num_tries + 1, min(count, _RESUMED)
        found = () if source is None else source.tokens(count, sequence.token_ids)
        waited = sequence.index in self._waiting
        self._waiting.discard(sequence.index)
        if source is None or not found:
            if waited:
                self.draft_length(sequence).update(0, 0)
            return None
        self._sources[sequence.index] = source
        return DraftChunk(group, sequence, 1, True, optional=len(found), proposed=found)

    def _source(self, group: SequenceGroup, sequence: Sequence) -> Source | None:
        """Index the group's new tokens. Return an earlier occurrence of ``sequence``'s last tokens, or None."""
        for each in group.sequences:  # all have the same prompt: it is noted once
            first = self._noted.get(each.index, each.num_prompt_tokens if self._noted else 0)
            self._noted[each.index] = end = len(each.token_ids) - 1  # nothing has followed the last token yet
            self._occurrences.add(each.token_ids, first, end)
        return self._occurrences.source(sequence.token_ids)

    def _parted(self, sequence: Sequence) -> Source | None:
        """Return the source of draft tokens from which a sequence has diverged, if drafts may be tried from it again
        now.

        Return None otherwise.
        """
        source, draft_length = self._sources.get(sequence.index), self.draft_length(sequence)
        assert isinstance(draft_length, LookupDraftLength)
        return source if source is not None and draft_length.resumes(source.num_tries) else None


def num_accepted(group: SequenceGroup, index: int) -> int:
    """Return how many tokens of completion ``index`` were accepted draft tokens."""
    return group.state.num_accepted[index] if isinstance(group.state, Drafts) else 0
