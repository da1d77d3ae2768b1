"""Compile grammars to matchers. Each engine has one compiler, created for its first request with a grammar."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from minillm.errors import UsageError
from minillm.grammar.grammar import Grammar
from minillm.grammar.matcher import Family, Matcher
from minillm.grammar.notation import limited_matcher, notation
from minillm.grammar.trial import readable
from minillm.grammar.vocabulary import NUM_CORES, Vocabulary

_SECONDS = 10.0  # time limit; `grammar.trial` has already compiled the grammar for single bytes within 4 seconds
_MOST_KEPT = 128
# Copies of a matcher share a lexer, so they compute their masks one after another. Separately compiled matchers compute
# masks in parallel. Therefore a grammar that is requested again is compiled again, up to this many times.
_FAMILIES = min(16, NUM_CORES)
_CHEAP_SECONDS = 0.05  # slower grammars are compiled only once


@dataclass
class _Kept:
    """The matchers of one grammar that the compiler keeps, all at the beginning of a text. Requests get copies of them.

    Each matcher was compiled separately, because copies of the same matcher cannot compute masks in parallel.
    """

    matchers: list[Matcher]
    seconds: float  # duration of the longest compilation
    turn: int = 0  # index of the next matcher to copy

    @property
    def may_grow(self) -> bool:
        """Return whether the next request should compile the grammar again, to add a matcher."""
        return not self.matchers or (len(self.matchers) < _FAMILIES and self.seconds < _CHEAP_SECONDS)


class Compiler:
    """Compiles grammars for one vocabulary. It keeps the latest compiled grammars for later requests.

    It is thread-safe.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._working = threading.Lock()
        self._looking = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a new matcher of ``grammar``, at the beginning of a text.

        Raises:
            UsageError: the grammar takes too long to compile for this vocabulary, or the vocabulary's tokens cannot
                spell any text that the grammar allows.
        """
        with self._looking:
            kept = self._kept.get(grammar) or _Kept([], 0.0)
            kept.matchers = [each for each in kept.matchers if not each.family.has_failed]
            matchers, may_grow = kept.matchers, kept.may_grow
        if may_grow:
            began = time.monotonic()
            try:
                matchers = [*matchers, self._compile(grammar)]
            except UsageError:
                if not matchers:
                    raise
            kept.seconds = max(kept.seconds, time.monotonic() - began)
        with self._looking:
            kept.matchers = matchers  # without matchers that another thread has added meanwhile
            self._kept[grammar] = kept
            self._kept.move_to_end(grammar)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            kept.turn = (kept.turn + 1) % len(matchers)
            return matchers[kept.turn].copy()

    def _compile(self, grammar: Grammar) -> Matcher:
        """Compile a grammar in a thread. Raises UsageError as `matcher` does.

        If compiling exceeds the time limit, the thread keeps running, because nothing can interrupt llguidance.
        """
        found: list[Matcher] = []
        failed: list[Exception] = []

        def work() -> None:
            try:
                with self._working:
                    state = limited_matcher(self._vocabulary.tokenizer, notation(grammar.kind, grammar.source))
                    matcher = Matcher(self._vocabulary, state, Family())
                    _ = matcher.is_exhausted  # makes the library do the deferred part of its work now
                found.append(matcher)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(_SECONDS)
        if failed:
            raise failed[0]
        if not found:
            raise UsageError("grammar: it takes too long to compile for this model's vocabulary; make it simpler")
        [matcher] = found
        if matcher.is_exhausted:
            error = matcher.state.get_error()
            if error and not error.startswith("NoExtension"):
                raise UsageError(f"grammar: it {readable(error)}")
            raise UsageError("grammar: it allows no text that this model's tokens can spell")
        return matcher
