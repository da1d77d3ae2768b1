"""Store finished answers in a part file, so that a run that was stopped continues without computing them again.

Answers are appended to a part file next to the output as they finish. At the end the part file becomes the output, in
the order of the requests.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from minillm.errors import MinillmError, UsageError
from minillm.text.reading import open_regular
from minillm.text.safe import json_line, parse_json


class _Line(NamedTuple):
    """An answer's place in the part file, in bytes, and whether the request failed."""

    begin: int
    length: int
    failed: bool


def check_output(output: Path, job: str, total: int, *, overwrite: bool) -> int | None:
    """Check the output file before anything is computed.

    Return None if the answers must be computed. If the file has them, return how many of the ``total`` requests failed.

    Raises UsageError if the file cannot be written. Without ``overwrite``, also if it holds anything other than the
    answers to these requests.
    """
    if not os.access(output.parent, os.W_OK):
        raise UsageError(f"cannot write {output}: its directory is not there, or cannot be written")
    try:
        with open_regular(output) as stream:
            answers = [] if overwrite else [(line["job"], line["error"]) for line in map(parse_json, stream)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        answers = [("", None)]  # not an output of this program
    if not answers:
        return None
    if [each for each, _ in answers] != [job] * total:
        way_out = "choose another --output, or add --force to overwrite it"
        raise UsageError(f"{output} holds something other than these answers; {way_out}")
    return sum(error is not None for _, error in answers)


class PartFile:
    """The finished answers of a run, each a JSON object with its request's ``index``.

    Args:
        output: the final file. The part file is in the same directory.
        job: identifies the requests. A part file of other requests is rejected.
    """

    def __init__(self, output: Path, job: str) -> None:
        self.output, self._job = output, job
        self._path = output.with_name(f"{output.name}.part0")
        self._stream = -1  # the descriptor while the file is open
        self._size = 0
        self._lines: dict[int, _Line] = {}  # by the request's index

    def open(self) -> None:
        """Create or continue the part file, and lock it against other processes.

        Raises:
            MinillmError: another run is writing the part file.
            UsageError: the part file cannot be written, or belongs to other requests.
        """
        self._size, self._lines = 0, {}
        try:
            self._stream = _open_locked(self._path)
            with open_regular(self._path) as stream:
                for line in stream:
                    if line.endswith(b"\n"):  # the last line may be cut off, if the process died
                        self._note(parse_json(line), len(line))
        except BlockingIOError:
            raise MinillmError(f"another run is writing {self.output}: wait for its end, or stop it") from None
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self._path} holds no answers; remove it, or choose another --output") from None
        os.ftruncate(self._stream, self._size)
        os.lseek(self._stream, self._size, os.SEEK_SET)
        if not self._size:
            self.add({})

    def close(self) -> None:
        """Close and unlock the part file."""
        if self._stream >= 0:
            os.close(self._stream)
            self._stream = -1

    def finished(self) -> set[int]:
        """Return the indices of the requests with an answer without error."""
        return {index for index, line in self._lines.items() if not line.failed}

    def add(self, answer: Mapping[str, Any]) -> None:
        """Append an answer to the part file at once, so that it survives a crash of this process.

        `open` also calls this method, to write the header line.
        """
        value = {**answer, "job": self._job}
        line = data = json_line(value).encode() + b"\n"
        while data:
            data = data[os.write(self._stream, data) :]
        self._note(value, len(line))

    def merge(self, indices: Collection[int]) -> int:
        """Write all answers to the output file in the order of ``indices``, atomically, and delete the part file.

        Return how many requests failed. Raises UsageError if answers are missing.
        """
        if missing := len(indices) - len(self._lines):
            raise UsageError(f"{missing} of {len(indices)} prompts are not finished; run the same command again")
        lines = [self._lines[index] for index in indices]
        temporary = self.output.with_name(self.output.name + ".merging")
        try:
            temporary.unlink(missing_ok=True)  # a link in its place is not followed
            with temporary.open("xb") as stream:
                stream.writelines(os.pread(self._stream, line.length, line.begin) for line in lines)
            temporary.replace(self.output)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._path.unlink()
        return sum(line.failed for line in lines)

    def discard_merged(self) -> None:
        """Delete the part file if the output has its answers: a run was killed after it had merged them."""
        if self._path.exists() and self.output.exists():
            with suppress(MinillmError), closing(self):  # of another run, or of other requests
                self.open()
                with suppress(OSError), open_regular(self.output) as merged:
                    lines = (os.pread(self._stream, line.length, line.begin) for _, line in sorted(self._lines.items()))
                    if self._lines and all(one == other for one, other in zip_longest(merged, lines)):
                        self._path.unlink()

    def _note(self, value: Mapping[str, Any], length: int) -> None:
        """Note the next line of the file. An answer replaces an earlier one only if the request failed before.

        Raises:
            KeyError, TypeError: the line is no answer.
            UsageError: the line is the header of a part file of other requests.
        """
        is_header = not self._size
        if is_header and value["job"] != self._job:
            raise UsageError(f"{self._path} holds answers to other requests; remove it, or choose another --output")
        if not is_header and ((known := self._lines.get(value["index"])) is None or known.failed):
            self._lines[value["index"]] = _Line(self._size, length, value.get("error") is not None)
        self._size += length


def _open_locked(path: Path) -> int:
    """Open and lock a file for reading and writing, and return its descriptor.

    Raises:
        BlockingIOError: another process has locked the file.
        OSError: the file cannot be opened.
    """
    while True:
        if path.exists():
            open_regular(path).close()
        stream = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
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
