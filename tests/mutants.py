"""Seeded faults: does any test notice? ``make mutants``, or ``python tests/mutants.py --only NAME``.

The table is in `faults.py`. Each fault is made in a copy of the working tree, one at a time, and the tests that belong
to it are run there. A fault is killed if one of them fails, crashes or hangs. One that survives asks for a test, or for
the reason why it changes nothing. `test_mutants.py` checks with the other tests that the table still fits the code.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import reached
from faults import FAULTS, Fault
from places import changed, lines_of

ROOT = Path(__file__).resolve().parents[1]
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "models"
)
ALWAYS_OUT = "not weights and not parity and not soak and not gpu"
# Each run is forked from a process that has imported the slow libraries, and nothing of ours.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "pytest", "hypothesis.stateful"])


@dataclass(frozen=True)
class Verdict:
    """The end of one fault: ``killed``, ``survives`` or ``broken`` (its tests cannot be run), by which test or why."""

    kind: str
    by: str
    seconds: float


def seeded(fault: Fault, text: str) -> str:
    """Return a file's text with a fault."""
    return changed(text, fault.function, fault.place, fault.new)


_read = cache(Path.read_text)


def _changes_nothing(fault: Fault, text: str) -> bool:
    """Return whether the syntax tree of the fault's function, or of the file, stays the same. Raises SyntaxError."""
    new = seeded(fault, text)
    begin, end = lines_of(text, fault.function)
    return _tree_of(text[begin:end]) == _tree_of(new[begin : len(new) - len(text) + end])


def _tree_of(lines: str) -> str:
    """Return the syntax tree of a file or a function as text."""
    return ast.dump(ast.parse(f"if True:\n{lines}" if lines.startswith(" ") else lines))


def problems(fault: Fault) -> list[str]:
    """List the problems of an entry of the table, as lines; none where it fits the code."""
    found = []
    if not (ROOT / fault.file).is_file():
        return [f"{fault.name}: there is no {fault.file}"]
    text = _read(ROOT / fault.file, encoding="utf-8")
    try:
        if _changes_nothing(fault, text):
            found.append(f"{fault.name}: {fault.file} stays the same")
    except LookupError as error:
        found.append(f"{fault.name}: {fault.file}: {error}")
    except SyntaxError as error:
        found.append(f"{fault.name}: {fault.file} would be no Python: {error}")
    for test in fault.tests:
        name, _, function = test.partition("::")
        path = ROOT / name
        if not path.is_file():
            found.append(f"{fault.name}: there is no {name}")
        elif function and not re.search(rf"^(async )?def {function.partition('[')[0]}\(", _read(path), re.M):
            found.append(f"{fault.name}: there is no {test}")
    if not fault.tests and not fault.harmless:
        found.append(f"{fault.name}: neither tests nor a reason why it changes nothing")
    return found


def difference(fault: Fault) -> list[str]:
    """List the lines that a fault takes away and adds."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    lines = unified_diff(text.splitlines(), seeded(fault, text).splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def work_in(tree: Path, tests: Sequence[str], output: Path, notes: Path | None = None) -> NoReturn:
    """Run tests in a copy of the tree and end this process with pytest's exit status.

    With a directory for notes, all tests run, and what they reach is noted there (see `reached`).
    """
    os.setsid()
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.chdir(tree)
    # The suite fails if the user's files change under it, and the user may chat meanwhile.
    os.environ |= {
        "PYTHONPATH": str(tree),
        "MINILLM_DATA": str(tree / ".data"),
        "MINILLM_CONFIG": str(tree / ".config"),
    }
    ours = [path for path in sys.path if Path(path).is_relative_to(ROOT) and not Path(path).is_relative_to(sys.prefix)]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ours)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "minillm"]:
        del sys.modules[name]
    import minillm

    assert Path(minillm.__file__).is_relative_to(tree), "another minillm is in the way"
    flags = ["-q", "--tb=line", "--disable-warnings", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    plugins = []
    if notes is None:
        flags.append("-x")
    else:
        plugins.append(reached.Plugin(notes))
        os.environ[reached.VARIABLE] = str(notes)
        reached.trace()
    status = pytest.main([*flags, "-m", ALWAYS_OUT, *tests], plugins=plugins)
    sys.stdout.flush()
    os._exit(status)


def run(tree: Path, tests: Sequence[str], timeout: float, notes: Path | None = None) -> tuple[int | None, str]:
    """Run tests in a copy of the tree. Returns the exit status (None: it took too long) and the output."""
    output = tree.with_suffix(".out")
    process = PROCESSES.Process(target=work_in, args=(tree, tests, output, notes))
    process.start()
    process.join(timeout)
    status = process.exitcode
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
    process.join()
    return status, output.read_text(errors="replace") if output.exists() else ""


def judge(fault: Fault, tree: Path, timeout: float) -> Verdict:
    """Make a fault in a copy of the tree, run its tests, and take it back."""
    text = seeded(fault, (tree / fault.file).read_text(encoding="utf-8"))
    return judge_text(tree, fault.file, text.encode(), fault.tests, timeout)


def judge_text(tree: Path, file: str, text: bytes, tests: Sequence[str], timeout: float) -> Verdict:
    """Give a file of a copy of the tree another text, run tests, and take it back."""
    path, began = tree / file, time.monotonic()
    sound, times = path.read_bytes(), path.stat()
    path.write_bytes(text)
    try:
        status, output = run(tree, tests, timeout)
    finally:
        path.write_bytes(sound)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seconds = time.monotonic() - began
    if status is None:
        return Verdict("killed", f"it hangs ({timeout:.0f} s)", seconds)
    if status == 0:
        return Verdict("survives", ", ".join(tests), seconds)
    if status in (4, 5):  # pytest knows no such test
        return Verdict("broken", output.strip().splitlines()[-1] if output.strip() else f"exit {status}", seconds)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.M)
    return Verdict("killed", failed[0].rpartition("/")[2] if failed else f"exit {status}", seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Seed faults, and see whether a test notices.")
    parser.add_argument("--only", metavar="NAME", action="append", help="faults whose name holds this; may be several")
    parser.add_argument("--list", action="store_true", help="print the table and end")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="faults at a time (1)")
    parser.add_argument("--timeout", metavar="S", type=float, default=300, help="a fault that takes longer hangs (300)")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if not options.only or any(part in fault.name for part in options.only)]
    if options.list:
        for fault in chosen:
            print(f"{fault.name:42} {fault.file:36} {fault.harmless or ' '.join(fault.tests)}")
            print("".join(f"    {line}\n" for line in difference(fault)), end="")
        return 0
    wrong = [line for fault in FAULTS for line in problems(fault)]
    if wrong or not chosen:
        print("\n".join(wrong or ["no fault has such a name"]))
        return 1
    for fault in (fault for fault in chosen if fault.harmless):
        print(f"{fault.name} changes nothing: {fault.harmless}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        seeded = [fault for fault in chosen if not fault.harmless]
        return run_all(seeded, Path(directory), max(1, options.jobs), options.timeout) if seeded else 0


def copies(directory: Path, jobs: int) -> queue.SimpleQueue[Path]:
    """Copy the tree as often as there are jobs, and set the environment of their processes."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # A killed run leaves objects behind: a warning about them is not news.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as in `conftest`: triton is among the imports
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(jobs):
        shutil.copytree(ROOT, directory / str(number), symlinks=True, ignore=LEFT_BEHIND)
        trees.put(directory / str(number))
    return trees


def run_all(chosen: list[Fault], directory: Path, jobs: int, timeout: float) -> int:
    """Judge faults in as many copies of the tree as there are jobs. Returns the exit status."""
    trees = copies(directory, jobs)
    tests = sorted({test for fault in chosen for test in fault.tests})
    print(f"{len(chosen)} faults; first their {len(tests)} tests without any", flush=True)
    status, output = run(directory / "0", tests, 3600)
    if status != 0:
        print(output or "they take more than an hour")
        return 1

    def work(fault: Fault) -> tuple[Fault, Verdict]:
        tree = trees.get()
        try:
            return fault, judge(fault, tree, timeout)
        finally:
            trees.put(tree)

    verdicts: dict[str, Verdict] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(work, fault) for fault in chosen]):
            fault, verdict = done.result()
            verdicts[fault.name] = verdict
            count = len(verdicts)
            killed = sum(each.kind == "killed" for each in verdicts.values())
            left = (time.monotonic() - began) / count * (len(chosen) - count)
            print(
                f"{count:3}/{len(chosen)}  {fault.name:42} {verdict.kind:8} {verdict.seconds:4.0f} s  "
                f"killed {killed / count:4.0%}  {left / 60:4.0f} min left  {verdict.by}",
                flush=True,
            )
    bad = [fault for fault in chosen if verdicts[fault.name].kind != "killed"]
    for fault in bad:
        print(f"{fault.name} ({fault.file}) {verdicts[fault.name].kind}: {verdicts[fault.name].by}")
    print(f"{len(chosen) - len(bad)} of {len(chosen)} faults killed in {(time.monotonic() - began) / 60:.0f} min")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
