"""Replicas share a list of requests, and an answer that is finished stays so.

Each replica writes its answers to a part file, line by line. When all have come to the end, the first one merges the
parts in the order of the requests. If a replica dies, the next run computes only the answers that no part has.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.errors import MinillmError, UsageError
from minillm.parallel.channel import Listener
from minillm.text.reading import open_regular
from minillm.text.safe import json_line, parse_json

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL = 0.02  # seconds


@dataclass(frozen=True)
class Replicas:
    """This process among ``count`` replicas; only rank 0 of each replica has one of these."""

    store: Store  # common to all of them
    index: int
    count: int
    size: int = 1  # ranks of each
    listener: Listener | None = None  # for the death of those on other nodes; torchrun ends those of its own node

    @classmethod
    def find(cls, tensor_parallel_size: int) -> Replicas:
        """Those that torchrun has started; without it, this process alone."""
        from torch.distributed import HashStore, PrefixStore

        from minillm.parallel.launch import Torchrun

        torchrun = Torchrun.from_environment()
        if torchrun is None:
            return cls(HashStore(), 0, 1)
        size, store = tensor_parallel_size, torchrun.store()
        own = PrefixStore("minillm/replicas", store)
        return cls(own, torchrun.rank // size, torchrun.num_replicas(size), size, torchrun.listener(store))

    def meet(self, where: str) -> None:
        """Wait until all replicas have come here. Raises RankDied."""
        self.arrive(where)
        self.wait_for_all(where)

    def arrive(self, where: str) -> None:
        self.store.set(f"{where}/{self.index}", "")

    def wait_for_all(self, where: str) -> None:
        """Wait until all replicas have arrived. Raises RankDied."""
        for index in range(self.count):
            while not self.store.check([f"{where}/{index}"]):
                if self.listener is not None:
                    self.listener.check([index * self.size])
                time.sleep(_POLL)

    def agreed(self, name: str, value: Callable[[], Sequence[int]]) -> list[int]:
        """The ``value`` of the first replica."""
        if self.index == 0:
            self.store.set(name, json.dumps(list(value())))
        return json.loads(self.store.get(name))

    def take(self, total: int, room: int) -> range:
        """The next of ``total`` things, ``room`` at most; none where all are taken. Each is handed out once.

        As long as there are many left a replica takes many, in the end one at a time, so that all end together (guided
        self-scheduling, Polychronopoulos and Kuck 1987).
        """
        left = total - self.store.add("taken", 0)
        if left <= 0 or room <= 0:
            return range(0)
        count = max(1, min(room, left // (2 * self.count)))
        end = self.store.add("taken", count)
        return range(min(end - count, total), min(end, total))


class PartFiles:
    """The lines that the replicas have finished, each a JSON object with its ``index``.

    They are merged into ``output``, and the parts lie beside it. The name of the ``job`` tells them from others'.
    """

    def __init__(self, output: Path, job: str) -> None:
        self._output, self._job = output, job
        self._stream: int | None = None

    @staticmethod
    def check(output: Path) -> None:
        """Raise UsageError where no file can be made: nothing should be computed for it."""
        try:
            if output.exists():
                open_regular(output).close()
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from None
        if not os.access(output.parent, os.W_OK):
            raise UsageError(f"cannot write {output}: its directory is not there, or cannot be written")

    def finished(self) -> dict[int, bytes]:
        """The lines by index, but those of failed requests. Raises UsageError where the parts are another job's."""
        return {index: line for index, line in self._lines().items() if json.loads(line).get("error") is None}

    def failures(self, total: int) -> int | None:
        """How many requests failed; None where there is no output yet. Raises UsageError where it is another job's."""
        try:
            with open_regular(self._output) as stream:
                answers = [(line["job"], line["error"] is not None) for line in map(parse_json, stream)]
            if not answers:
                return None
            if [job for job, _ in answers] == [self._job] * total:
                return sum(failed for _, failed in answers)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no file, or none of ours
        way_out = "choose another --output, or say --force to overwrite it"
        raise UsageError(f"{self._output} holds something other than these answers; {way_out}")

    def open(self, replica: int) -> None:
        """Begin, or go on with, the part of this replica. No other process writes it from now on.

        Raises:
            MinillmError: another run is writing it.
            UsageError: the file cannot be written.
        """
        path = self._output.with_name(f"{self._output.name}.part{replica}")
        try:
            self._stream = _open_locked(path)
            self._lines()  # raises where it is no part of this job's
            known = _read(path)
        except BlockingIOError:
            raise MinillmError(f"another run is writing {self._output}: wait for its end, or stop it") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        whole = known.rfind(b"\n") + 1  # a line that was being written when the replica died is gone
        os.ftruncate(self._stream, whole)
        os.lseek(self._stream, whole, os.SEEK_SET)
        if not whole:
            self.add({})

    def close(self) -> None:
        """Let another run go on with the part."""
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Keep a finished request: it survives this process from here on. The first line is of none."""
        assert self._stream is not None, "not open"
        data = json_line({**line, "job": self._job}).encode() + b"\n"
        while data:
            data = data[os.write(self._stream, data) :]

    def merge(self, total: int) -> int:
        """Replace the parts by the output, in order and at once; returns how many requests failed.

        Raises UsageError where some are missing.
        """
        lines = self._lines()
        if missing := total - len(lines):
            raise UsageError(f"{missing} of {total} prompts are not finished; run the same command again")
        temporary = self._output.with_name(self._output.name + ".merging")
        try:
            temporary.unlink(missing_ok=True)  # a link in its place is not followed
            with temporary.open("xb") as stream:
                stream.write(b"".join(lines[index] for index in range(total)))
            temporary.replace(self._output)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        for part in self._parts():
            part.unlink()
        return sum(json.loads(line).get("error") is not None for line in lines.values())

    def _parts(self) -> list[Path]:
        prefix = self._output.name + ".part"
        beside = self._output.parent.iterdir() if self._output.parent.is_dir() else []
        return sorted(path for path in beside if path.name.startswith(prefix) and path.name[len(prefix) :].isdecimal())

    def _lines(self) -> dict[int, bytes]:
        """All whole lines; where a request failed and was finished later, the later one."""
        found: dict[int, bytes] = {}
        for path in self._parts():
            whole = _read(path).split(b"\n")[:-1]
            if not whole:
                continue
            header, *lines = whole
            try:
                same_job = parse_json(header)["job"] == self._job
                indices = [parse_json(line)["index"] for line in lines] if same_job else []
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{path} holds no answers; remove it, or choose another --output") from None
            if not same_job:
                raise UsageError(f"{path} holds answers to other requests; remove it, or choose another --output")
            for index, line in zip(indices, lines, strict=True):
                if index not in found or json.loads(found[index]).get("error") is not None:
                    found[index] = line + b"\n"
        return found


def _open_locked(path: Path) -> int:
    """Open a file for writing that no other process has locked. Raises OSError; BlockingIOError where one has."""
    while True:
        if path.exists():
            open_regular(path).close()
        stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(stream), path.stat()):
                return stream
        except BlockingIOError:
            os.close(stream)
            raise
        except OSError:
            return stream  # a file system without locks
        os.close(stream)  # its run has merged and deleted it meanwhile


def _read(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read()
