"""Record the functions that each test reaches, also in the processes that it starts.

As a plugin of pytest it numbers the tests and records their times. In the traced copy of the tree, a `sitecustomize`
calls `trace`, so all processes record each function's first call in each test.
"""

from __future__ import annotations

import ast
import json
import mmap
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "MINILLM_REACHED"  # the directory of the notes
STARTER = "import os, sys\nsys.path.append({folder!r})\nimport reached\nreached.trace()\n"


@dataclass
class Reach:
    """The functions that a run of the tests reached.

    Attributes:
        seconds: that each test took, with the fixtures that it was the first to need.
        tests: by file and outermost function, the tests that call it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))

    def of(self, file: str, function: str) -> list[str]:
        """Return the tests that reach a function, the fastest first.

        For code outside of functions: the tests that reach a function of the file, or whose own file imports it.
        """
        if function:
            found = self.tests.get((file, function), set())
        else:
            found = {test for (name, _), tests in self.tests.items() if name == file for test in tests}
            found |= {test for test in self.seconds if module_of(file) in imports_of(test.partition("::")[0])}
        return sorted((test for test in found if test in self.seconds), key=lambda test: self.seconds[test])


def module_of(file: str) -> str:
    """Return the module in a file: ``ui`` is a part of ``minillm``."""
    return ".".join(["minillm", *Path(file).with_suffix("").parts]).replace("minillm.minillm", "minillm")


@cache
def imports_of(file: str) -> frozenset[str]:
    """Return the modules that a file of the project imports, with their names as modules; empty if it is missing."""
    path, found = Path(__file__).parents[1] / file, set[str]()
    for node in ast.walk(ast.parse(path.read_text() if path.is_file() else "")):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return frozenset(found)


def trace() -> None:
    """Begin to note functions, if the environment names a directory for it."""
    directory = os.environ.get(VARIABLE)
    if not directory or not os.path.exists(os.path.join(directory, "now")):
        return
    with open(os.path.join(directory, "now"), "rb") as file:
        now = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    descriptor = os.open(os.path.join(directory, f"{os.getpid()}.calls"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    tree = os.environ["PYTHONPATH"].split(os.pathsep)[0] + os.sep
    ours: dict[Any, str] = {}
    seen: set[tuple[bytes, Any]] = set()

    def called(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        name = ours.get(code)
        if name is None:
            path = code.co_filename
            is_ours = path.startswith(tree) and "/tests/" not in path and code.co_name[0] != "<"
            function = code.co_qualname.partition(".<locals>")[0]
            name = ours[code] = f"{os.path.realpath(path)[len(tree) :]}\t{function}" if is_ours else ""
        if name and (key := (now[:8], code)) not in seen:
            seen.add(key)
            os.write(descriptor, f"{int.from_bytes(key[0], 'little')}\t{name}\n".encode())

    threading.settrace(called)
    sys.settrace(called)


class Plugin:
    """Numbers the tests."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._number = directory, 0
        (directory / "now").write_bytes(bytes(8))

    def pytest_runtest_protocol(self, item: Any) -> None:
        self._number += 1
        with (self._directory / "now").open("r+b") as file:
            file.write(self._number.to_bytes(8, "little"))
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown" or not report.passed:
            line = [self._number, report.nodeid, time.monotonic() - self._began, report.passed]
            with (self._directory / "tests").open("a") as file:
                file.write(json.dumps(line) + "\n")


def read(directory: Path) -> Reach:
    """Return what was noted; tests that failed or were skipped are left out."""
    reach, names, bad = Reach(), {}, set()
    for number, name, seconds, passed in _lines(directory / "tests"):
        names[number] = name
        reach.seconds[name] = seconds
        if not passed:
            bad.add(name)
    for name in bad:
        del reach.seconds[name]
    for path in directory.glob("*.calls"):
        for line in path.read_text(errors="replace").splitlines():
            number, _, rest = line.partition("\t")
            file, _, function = rest.partition("\t")
            if number.isdigit() and int(number) in names:
                reach.tests[file, function].add(names[int(number)])
    return reach


def _lines(path: Path) -> Iterator[Any]:
    return (json.loads(line) for line in path.read_text().splitlines()) if path.exists() else iter(())
