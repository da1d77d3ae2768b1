"""Share a list of requests among replicas, and keep finished answers.

Each replica writes its answers to a part file, line by line. When all have finished, the first one merges the parts in
the order of the requests. If a replica dies, the next run computes only the answers that no part has.
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
    listener: Listener | None = None  # for the death of ranks on other nodes; torchrun supervises its own node

    @classmethod
    def find(cls, tensor_parallel_size: int) -> Replicas:
        """Return the replicas started by torchrun; without it, this process alone."""
        from torch.distributed import HashStore, PrefixStore

        from minillm.parallel.launch import Torchrun

        torchrun = Torchrun.from_environment()
        if torchrun is None:
            return cls(HashStore(), 0, 1)
        size, store = tensor_parallel_size, torchrun.store()
        own = PrefixStore("minillm/replicas", store)
        return cls(own, torchrun.rank // size, torchrun.num_replicas(size), size, torchrun.listener(store))

    def meet(self, where: str) -> None:
        """Wait until all replicas have reached this point. Raises RankDied."""
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
        """Return the ``value`` of the first replica."""
        if self.index == 0:
            self.store.set(name, json.dumps(list(value())))
        return json.loads(self.store.get(name))

    def take(self, total: int, room: int) -> range:
        """Take the next of ``total`` items, at most ``room``; empty if all are taken. Each is taken once.

        While many items are left, a replica takes many, at the end one at a time, so that all finish together (guided
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

    They are merged into ``output``; the parts are in the same directory. The ``job`` identifies parts of the same
    requests.
    """

    def __init__(self, output: Path, job: str) -> None:
        self._output, self._job = output, job
        self._stream: int | None = None

    @staticmethod
    def check(output: Path) -> None:
        """Raise UsageError if the output cannot be written, before anything is computed."""
        try:
            if output.exists():
                open_regular(output).close()
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from None
        if not os.access(output.parent, os.W_OK):
            raise UsageError(f"cannot write {output}: its directory is not there, or cannot be written")

    def finished(self) -> dict[int, bytes]:
        """Return the lines of successful requests by index. Raises UsageError if the parts belong to another job."""
        return {index: line for index, line in self._lines().items() if json.loads(line).get("error") is None}

    def failures(self, total: int) -> int | None:
        """Return how many requests failed; None without an output. Raises UsageError if it belongs to another job."""
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
            pass  # not a readable output of this program
        way_out = "choose another --output, or add --force to overwrite it"
        raise UsageError(f"{self._output} holds something other than these answers; {way_out}")

    def open(self, replica: int) -> None:
        """Begin or continue the part of this replica, and lock it against other processes.

        Raises:
            MinillmError: another run is writing it.
            UsageError: the file cannot be written.
        """
        path = self._output.with_name(f"{self._output.name}.part{replica}")
        try:
            self._stream = _open_locked(path)
            self._lines()  # raises if it belongs to another job
            known = _read(path)
        except BlockingIOError:
            raise MinillmError(f"another run is writing {self._output}: wait for its end, or stop it") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        whole = known.rfind(b"\n") + 1  # drops a line that was cut off when the replica died
        os.ftruncate(self._stream, whole)
        os.lseek(self._stream, whole, os.SEEK_SET)
        if not whole:
            self.add({})

    def close(self) -> None:
        """Unlock the part for other runs."""
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a finished request, which then survives this process. The first line belongs to no request."""
        assert self._stream is not None, "not open"
        data = json_line({**line, "job": self._job}).encode() + b"\n"
        while data:
            data = data[os.write(self._stream, data) :]

    def merge(self, total: int) -> int:
        """Replace the parts by the output, in order and atomically; return how many requests failed.

        Raises UsageError if some are missing.
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
        """Return all complete lines. If a request failed and succeeded later, the later line counts."""
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
    """Open and lock a file for writing. Raises OSError; BlockingIOError if another process has locked it."""
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
        os.close(stream)  # the other run has merged and deleted it


def _read(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read()
