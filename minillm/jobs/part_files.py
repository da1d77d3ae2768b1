"""Store finished answers in a part file, so that a run that was stopped continues without computing them again.

Answers are appended to a part file next to the output as they finish. At the end the part file becomes the output, in
the order of the requests. Earlier versions wrote several part files at a time; all of these are read.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError, UsageError
from minillm.text.reading import open_regular
from minillm.text.safe import json_line, parse_json


class PartFiles:
    """The finished answers of a run, each a JSON object with its request's ``index``.

    Args:
        output: the final file. The part file is in the same directory.
        job: identifies the requests. A part file of other requests is rejected.
    """

    def __init__(self, output: Path, job: str) -> None:
        self._output, self._job = output, job
        self._stream: int | None = None

    @staticmethod
    def check(output: Path) -> None:
        """Raise UsageError if the output cannot be written. Call this before anything is computed."""
        try:
            if output.exists():
                open_regular(output).close()
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from None
        if not os.access(output.parent, os.W_OK):
            raise UsageError(f"cannot write {output}: its directory is not there, or cannot be written")

    def finished(self) -> dict[int, bytes]:
        """Return the finished answers without error, as encoded lines, by the request's index.

        Raises UsageError if a part file has another ``job``.
        """
        return {index: line for index, line in self._lines().items() if json.loads(line).get("error") is None}

    def failures(self, total: int) -> int | None:
        """Return how many of ``total`` requests failed according to the output; None if there is no output.

        Raises UsageError if the output file holds anything other than the answers to these requests.
        """
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

    def open(self) -> None:
        """Create or continue the part file, and lock it against other processes.

        Raises:
            MinillmError: another run is writing the part file.
            UsageError: the part file cannot be written, or belongs to other requests.
        """
        path = self._output.with_name(f"{self._output.name}.part0")
        try:
            self._stream = _open_locked(path)
            self._lines()  # raises if a part file belongs to another job
            known = _read(path)
        except BlockingIOError:
            raise MinillmError(f"another run is writing {self._output}: wait for its end, or stop it") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        whole = known.rfind(b"\n") + 1  # drops a line that was cut off when the process died
        os.ftruncate(self._stream, whole)
        os.lseek(self._stream, whole, os.SEEK_SET)
        if not whole:
            self.add({})

    def close(self) -> None:
        """Close and unlock the part file."""
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Append an answer to the part file at once, so that it survives a crash of this process.

        `open` also calls this method, to write the header line.
        """
        assert self._stream is not None, "not open"
        data = json_line({**line, "job": self._job}).encode() + b"\n"
        while data:
            data = data[os.write(self._stream, data) :]

    def merge(self, indices: Collection[int]) -> int:
        """Write all answers to the output file in the order of ``indices``, atomically, and delete the part files.

        Return how many requests failed. Raises UsageError if answers are missing.
        """
        lines = self._lines()
        if missing := len(indices) - len(lines):
            raise UsageError(f"{missing} of {len(indices)} prompts are not finished; run the same command again")
        temporary = self._output.with_name(self._output.name + ".merging")
        try:
            temporary.unlink(missing_ok=True)  # a link in its place is not followed
            with temporary.open("xb") as stream:
                stream.write(b"".join(lines[index] for index in indices))
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
        """Return the encoded answer of each request, by index. An incomplete last line is ignored.

        If a request failed and succeeded later, the later answer counts.
        """
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
    """Open and lock a file for writing, and return its descriptor.

    Raises:
        BlockingIOError: another process has locked the file.
        OSError: the file cannot be opened.
    """
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
        os.close(stream)  # another run has merged and deleted the file meanwhile


def _read(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read()
