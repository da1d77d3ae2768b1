"""Beam search on the device: from the logits, the device chooses beams and forks them without waiting for the CPU.

Each beam has a row of the device state (`minillm.runner.device.rows`). The CPU assigns rows to searches, and applies
the device's choices one step later. Each beam has a last, partly filled block of its own. A beam may be replaced by a
continuation of another beam. The last block of that other beam is then copied into the last block of the replaced beam.
So the device allocates no blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import KVCache, Search, SearchField
from minillm.kernels.arguments import power_of_two
from minillm.parallel.collectives import Ranks
from minillm.runner.device.ahead import Shape
from minillm.runner.device.graphs import Graphs
from minillm.runner.device.rows import Rows, padded_size
from minillm.runner.to_device import to_device
from minillm.runner.to_host import ToHost
from minillm.sequence import Chunk, SequenceGroup

_WIDTHS = 2, 4, 8, 16  # widths of searches for which kernels are compiled ahead


@dataclass(slots=True)
class DeviceSearch:
    """A beam search that the device runs by itself: the value of `SequenceGroup.device`."""

    search: Search
    num_common_blocks: int = 0  # how many first blocks all beams will share, whatever the device chooses


class Chosen:
    """The best continuations that the device has found for each search in one step; `wait` copies them to the CPU."""

    def __init__(self, searches: Sequence[Search], logprobs: Tensor, choices: Tensor) -> None:
        self._counts = [search.num_candidates for search in searches]
        self._results = ToHost([logprobs[: len(searches)], choices[: len(searches)]])

    def wait(self) -> list[list[tuple[float, int, int]]]:
        """Wait for the device. Return a list of (log-probability, beam, token) for each search, best first.

        A beam is given by its index in its search.
        """
        logprobs, choices = self._results.wait()
        return [
            list(zip(values[:count], beams[:count], tokens[:count], strict=True))
            for count, values, (beams, tokens) in zip(self._counts, logprobs, choices, strict=True)
        ]


class DeviceBeams:
    """The device's buffers and CUDA graphs for one step of all beam searches.

    Args:
        words: the device state of all decoding sequences, a row for each: see `DeviceState`.
        kv_cache: the pool.
        capacity: maximum number of beams, padding included.
        vocab: size of the vocabulary; 0 on ranks other than 0, which make no choices.
        graphs: capture CUDA graphs. Otherwise launch each kernel.
    """

    def __init__(
        self,
        words: Tensor,
        kv_cache: KVCache,
        block_size: int,
        capacity: int,
        vocab: int,
        ranks: Ranks | None,
        *,
        graphs: bool,
    ) -> None:
        self._words, self._kv_cache, self._block_size = words, kv_cache, block_size
        self._vocab, self._ranks, device = vocab, ranks, words.device
        self._rows = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._logit_rows = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._searches = torch.zeros(capacity, SearchField.WORDS, dtype=torch.int32, device=device)
        self._parents = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._graphs = Graphs(self._rows, enabled=graphs)
        self.forget()

    def forget(self) -> None:
        """Forget what the device knows, because a step has failed: the next step sends everything again."""
        self._size = 0
        self._sent: tuple[list[int], list[Search]] | None = None
        self._choices: tuple[list[SequenceGroup], Chosen] | None = None  # of the last step, until they are taken

    def close(self) -> None:
        self._graphs.clear()

    def begin(self, rows: list[int] | None) -> None:
        """Set the rows of this step's beams, -1 for padding. None: the same rows as in the last step with beams."""
        if rows is not None:
            self._size = len(rows)
            self._rows[: self._size].copy_(to_device(rows, torch.int32, self._rows.device))

    def run(self, logits: Tensor, recorded: Tensor, decodes: list[Chunk], cpu_rows: Rows) -> None:
        """Advance the beam searches among ``decodes`` by one step, and keep the choices for `take_choices`.

        Args:
            logits: the step's logits ``[n, vocab]``.
            recorded: the buffer from which CUDA graphs read logits. If ``logits`` is elsewhere, no graph is used.
            decodes: the step's decodes.
            cpu_rows: the CPU's record of the device state.
        """
        if self._ranks is not None and self._ranks.rank:
            self.fork()
            return
        beams = [chunk for chunk in decodes if chunk.group.device]
        groups = list(dict.fromkeys(chunk.group for chunk in beams))
        searches = [group.device.search for group in groups]
        is_recorded = logits.data_ptr() == recorded.data_ptr()
        logit_rows = [chunk.row for chunk in beams]
        chosen = self.choose(recorded if is_recorded else logits, logit_rows, searches, recorded=is_recorded)
        cpu_rows.note_drawn(beams)
        self._choices = groups, chosen

    def take_choices(self) -> tuple[list[SequenceGroup], Chosen] | None:
        """Return the groups that had a beam search in the last step, and the choices of their searches; then forget
        both.

        Return None if the last step had no beam search, or if its choices have been taken.
        """
        choices, self._choices = self._choices, None
        return choices

    def choose(self, logits: Tensor, logit_rows: list[int], searches: list[Search], *, recorded: bool) -> Chosen:
        """Choose the best continuations of each search, and fork the beams' rows and blocks accordingly.

        Args:
            logits: ``[n, vocab]``.
            logit_rows: each beam's row of logits; the beams of a search are consecutive.
            searches: the settings of each search.
            recorded: ``logits`` is in the buffer that CUDA graphs read, so a graph can be used.
        """
        if self._sent != (logit_rows, searches):
            self._send_searches(logit_rows, searches)
            self._sent = logit_rows, searches
        size, number = self._size, padded_size(len(searches))
        count = min(power_of_two(max(search.num_candidates for search in searches)), self._vocab)
        width = power_of_two(max(search.width for search in searches))
        whole = logit_rows == list(range(len(logit_rows))) and len(logits) >= size
        key = size, number, count, width, whole
        work = partial(self._choose, logits, *key)
        logprobs, choices = self._graphs.run(("choose", *key), work) if recorded else work()
        if self._ranks is not None:
            self.fork()
        return Chosen(searches, logprobs, choices)

    def shapes(self, logits: Tensor) -> Iterator[Shape]:
        """Yield the shapes of one search alone, one for each usual beam width. ``logits`` is as for `choose`."""
        for width in _WIDTHS:
            if (size := padded_size(width)) <= len(self._rows):
                count = min(power_of_two(2 * width), self._vocab)
                yield Shape(partial(self._choose, logits, size, 1, count, power_of_two(width), True))

    def _choose(
        self, logits: Tensor, size: int, number: int, count: int, width: int, whole: bool
    ) -> tuple[Tensor, Tensor]:
        """Choose for ``number`` searches with ``size`` beams in total, and fork. Return log-probabilities and choices.

        ``whole``: the beams' logits are the first rows of ``logits``.
        """
        beams = logits[:size] if whole else logits.index_select(0, self._logit_rows[:size])
        values, ids = kernels.top_log_probabilities(beams, count)
        parents, *found = kernels.choose_beams(
            self._words, self._rows[:size], self._searches[:number], values, ids, self._vocab, width
        )
        if self._ranks is None:
            self._fork(size, parents)
        else:
            self._parents[:size].copy_(parents)
        return found[0], found[1]

    def fork(self) -> None:
        """Fork the beams' rows and blocks as rank 0 has chosen."""
        size = self._size
        self._graphs.run(("fork", size), lambda: self._fork(size, self._parents[:size]))

    def _fork(self, size: int, parents: Tensor) -> None:
        if self._ranks is not None:
            self._ranks.broadcast(parents)
        copies = kernels.fork_rows(self._words, self._rows[:size], parents, self._block_size)
        for tensor in self._kv_cache.tensors:
            kernels.block_copy(tensor, copies)

    def _send_searches(self, logit_rows: list[int], searches: list[Search]) -> None:
        """Send to the device the settings of each search, and the index of each beam's row of logits."""
        words: list[int] = []
        first = 0
        for search in searches:
            ends = [*search.end_ids, *[-1] * (SearchField.MOST_ENDS - len(search.end_ids))]
            head = [first, search.width, search.num_candidates]
            words += [*head, *[0] * (SearchField.ENDS - len(head)), *ends]
            first += search.width
        words += [0] * SearchField.WORDS * (padded_size(len(searches)) - len(searches))
        device = self._words.device
        self._searches.view(-1)[: len(words)].copy_(to_device(words, torch.int32, device))
        padding = [0] * (self._size - len(logit_rows))
        self._logit_rows[: self._size].copy_(to_device(logit_rows + padding, torch.int64, device))
