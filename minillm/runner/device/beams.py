"""Beam searches that the device runs by itself, after computing their logits.

The CPU assigns rows to searches, and applies the choices one step later. Each beam owns its last,
partly filled block, so a row that continues another's beam has a block to copy into, and nothing is allocated here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import KVCache, Search, SearchField
from minillm.parallel.collectives import Ranks
from minillm.runner.device.graphs import Graphs
from minillm.runner.device.rows import Rows, padded_size
from minillm.runner.to_device import to_device
from minillm.runner.to_host import ToHost
from minillm.sequence import Chunk, SequenceGroup


@dataclass(slots=True)
class DeviceSearch:
    """A beam search that the device runs by itself: `SequenceGroup.device`."""

    search: Search
    num_common_blocks: int = 0  # the first blocks of its sequences, the same ones whatever the device decides


class Chosen:
    """The candidates of each search; `wait` copies them to the CPU."""

    def __init__(self, searches: Sequence[Search], logprobs: Tensor, choices: Tensor) -> None:
        self._counts = [search.num_candidates for search in searches]
        self._results = ToHost([logprobs[: len(searches)], choices[: len(searches)]])

    def wait(self) -> list[list[tuple[float, int, int]]]:
        """Return (log-probability, beam, token) of each search, best first; a beam is its index in the search."""
        logprobs, choices = self._results.wait()
        return [
            list(zip(values[:count], beams[:count], tokens[:count], strict=True))
            for count, values, (beams, tokens) in zip(self._counts, logprobs, choices, strict=True)
        ]


class DeviceBeams:
    """The rows that are beams, their searches, and the graphs of a step.

    Args:
        words: the rows of all decoding sequences.
        kv_cache: the pool.
        capacity: beams at most, padding included.
        vocab: tokens; 0 on a rank that does not choose.
        graphs: capture CUDA graphs.
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
        self._places = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._searches = torch.zeros(capacity, SearchField.WORDS, dtype=torch.int32, device=device)
        self._parents = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._graphs = Graphs(self._rows, enabled=graphs)
        self.forget()

    def forget(self) -> None:
        """Send everything again: a step has failed."""
        self._size = 0
        self._told: tuple[list[int], list[Search]] | None = None
        self._choices: tuple[list[SequenceGroup], Chosen] | None = None  # of the last step, until they are taken

    def close(self) -> None:
        self._graphs.clear()

    def begin(self, rows: list[int] | None) -> None:
        """Set the rows that are beams in this step, with padding; None: as in the last step with any."""
        if rows is not None:
            self._size = len(rows)
            self._rows[: self._size].copy_(to_device(rows, torch.int32, self._rows.device))

    def run(self, logits: Tensor, recorded: Tensor, decodes: list[Chunk], books: Rows) -> None:
        """Run the step of the searches among ``decodes``, rows and blocks included, for `take_choices`.

        Args:
            logits: ``[n, vocab]`` of the step; a graph can read them if they begin where ``recorded`` begin.
        """
        if self._ranks is not None and self._ranks.rank:
            self.fork()
            return
        beams = [chunk for chunk in decodes if chunk.group.device]
        groups = list(dict.fromkeys(chunk.group for chunk in beams))
        searches = [group.device.search for group in groups]
        is_recorded = logits.data_ptr() == recorded.data_ptr()
        places = [chunk.row for chunk in beams]
        chosen = self.choose(recorded if is_recorded else logits, places, searches, recorded=is_recorded)
        books.note_drawn(beams)
        self._choices = groups, chosen

    def take_choices(self) -> tuple[list[SequenceGroup], Chosen] | None:
        """Return the last step's choices, once: the groups with forked sequences, and how they forked."""
        choices, self._choices = self._choices, None
        return choices

    def choose(self, logits: Tensor, places: list[int], searches: list[Search], *, recorded: bool) -> Chosen:
        """Run a step of each search, and fork the rows accordingly.

        Args:
            logits: ``[n, vocab]``.
            places: each beam's row of logits; the beams of a search are consecutive.
            recorded: ``logits`` have the address of every step's logits, so that a graph can read them.
        """
        if self._told != (places, searches):
            self._tell(places, searches)
            self._told = places, searches
        size, number = self._size, padded_size(len(searches))
        count = min(_power_of_two(max(search.num_candidates for search in searches)), self._vocab)
        width = _power_of_two(max(search.width for search in searches))
        whole = places == list(range(len(places))) and len(logits) >= size

        def work() -> tuple[Tensor, Tensor]:
            beams = logits[:size] if whole else logits.index_select(0, self._places[:size])
            values, ids = kernels.top_log_probabilities(beams, count)
            parents, *found = kernels.choose_beams(
                self._words, self._rows[:size], self._searches[:number], values, ids, self._vocab, width
            )
            if self._ranks is None:
                self._fork(size, parents)
            else:
                self._parents[:size].copy_(parents)
            return found[0], found[1]

        logprobs, choices = (
            self._graphs.run(("choose", size, number, count, width, whole), work) if recorded else work()
        )
        if self._ranks is not None:
            self.fork()
        return Chosen(searches, logprobs, choices)

    def fork(self) -> None:
        """Fork the rows by the choices of rank 0."""
        size = self._size
        self._graphs.run(("fork", size), lambda: self._fork(size, self._parents[:size]))

    def _fork(self, size: int, parents: Tensor) -> None:
        if self._ranks is not None:
            self._ranks.broadcast(parents)
        copies = kernels.fork_rows(self._words, self._rows[:size], parents, self._block_size)
        for tensor in self._kv_cache.tensors:
            kernels.block_copy(tensor, copies)

    def _tell(self, places: list[int], searches: list[Search]) -> None:
        """Send the list of searches, and the rows of their logits."""
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
        padding = [0] * (self._size - len(places))
        self._places[: self._size].copy_(to_device(places + padding, torch.int64, device))


def _power_of_two(n: int) -> int:
    return max(2, 1 << (n - 1).bit_length())
