"""Mutation testing: does any test notice a small change of the code? ``make mutants``, or ``python tests/mutate.py``.

200 changes are drawn with a fixed seed, as many from each folder of `mutations`. The tests run once, to learn which
reach each function (`reached`). Then each change is made in a copy of the tree, and the tests that reach its function
run there. A change that survives asks for a test, or for an entry in `equivalents.py` that says why it changes nothing.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import reached
from equivalents import EQUIVALENTS
from mutants import Verdict, copies, judge_text, run
from mutations import FOLDERS, Mutation, drawn
from reached import Reach

TESTS = ("tests/server", "tests/service", "tests/grammar", "tests/ui", "tests/cli/test_grammars.py")
_TOGETHER = 240.0  # seconds of tests for one change, and
_MOST_TESTS = 400
_NO_MODULE = "found no collectors for"  # the words of pytest for a test whose file cannot be imported


def equivalent(change: Mutation) -> str:
    """Return the reason why a change changes nothing; empty where none is known for its present text."""
    old, new, reason = EQUIVALENTS.get(change.name, ("", "", ""))
    return reason if (old, new) == (change.old, change.new) else ""


def tests_of(change: Mutation, reach: Reach) -> list[str]:
    """Return the tests to run for a change: tests that reach its function, the fastest first, up to a bound."""
    found: list[str] = []
    seconds = 0.0
    for test in reach.of(change.file, change.function)[:_MOST_TESTS]:
        seconds += reach.seconds[test]
        if found and seconds > _TOGETHER:
            break
        found.append(test)
    return found


def learn(tree: Path, tests: Sequence[str]) -> Reach:
    """Run the tests in a copy of the tree and return what they reach."""
    notes = tree.with_suffix(".notes")
    notes.mkdir()
    starter = tree / "sitecustomize.py"
    starter.write_text(reached.STARTER.format(folder=str(Path(__file__).parent)))
    status, output = run(tree, tests, 7200, notes)
    starter.unlink()
    os.environ.pop(reached.VARIABLE, None)
    reach = reached.read(notes)
    print(f"{len(reach.seconds)} tests reach {len(reach.tests)} functions (exit status {status})", flush=True)
    if failed := re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE):
        print("these fail while they are traced, and judge no change: " + " ".join(failed), flush=True)
    if not reach.seconds:
        print(output)
    return reach


def judge(change: Mutation, reach: Reach, tree: Path, timeout: float) -> Verdict:
    tests = tests_of(change, reach)
    if not tests:
        return Verdict("survives", "no test reaches it", 0.0)
    text = change.applied((tree / change.file).read_bytes())
    verdict = judge_text(tree, change.file, text, tests, timeout + 3 * sum(reach.seconds[test] for test in tests))
    if verdict.kind == "broken" and _NO_MODULE in verdict.by:
        return Verdict("killed", "the module cannot be imported", verdict.seconds)
    return verdict


def line(change: Mutation, verdict: Verdict) -> str:
    """Return a change and its end, in one line."""
    before, after = (" ".join(text.split())[:90] for text in (change.old, change.new))
    by = verdict.by if verdict.kind == "killed" else f"{verdict.by.count('::')} tests"
    return f"{verdict.kind:9} {change.name} (line {change.line}): {before} -> {after}  [{verdict.seconds:.0f} s, {by}]"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Change the code here and there, and see whether a test notices.")
    parser.add_argument("--amount", metavar="N", type=int, default=200, help="changes to draw (200)")
    parser.add_argument("--seed", metavar="N", type=int, default=45, help="of the draw (45)")
    parser.add_argument("--only", metavar="TEXT", action="append", help="changes whose name holds this; may be several")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="changes at a time (1)")
    parser.add_argument("--timeout", metavar="S", type=float, default=60, help="beyond its tests' time: it hangs (60)")
    parser.add_argument("--reach", metavar="FILE", type=Path, help="keep there what the tests reach, or read it")
    parser.add_argument("--tests", metavar="PATH", nargs="+", default=TESTS, help="tests to run")
    parser.add_argument("--list", action="store_true", help="print the changes and end")
    options = parser.parse_args(arguments)
    chosen = [each for each in drawn(options.amount, options.seed) if _is_wanted(each, options.only)]
    if options.list:
        for change in chosen:
            print(line(change, Verdict("drawn", "", 0.0)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        return run_all(chosen, Path(directory), options)


def _is_wanted(change: Mutation, only: list[str] | None) -> bool:
    return not only or any(part in change.name for part in only)


def run_all(chosen: list[Mutation], directory: Path, options: argparse.Namespace) -> int:
    """Judge changes in as many copies of the tree as there are jobs. Returns the exit status."""
    trees = copies(directory, max(1, options.jobs))
    if options.reach is not None and options.reach.exists():
        reach: Reach = pickle.loads(options.reach.read_bytes())
    else:
        print(f"first what the tests of {', '.join(FOLDERS)} reach", flush=True)
        reach = learn(directory / "0", options.tests)
        if options.reach is not None:
            options.reach.write_bytes(pickle.dumps(reach))

    def work(change: Mutation) -> tuple[Mutation, Verdict]:
        if reason := equivalent(change):
            return change, Verdict("equivalent", reason, 0.0)
        tree = trees.get()
        try:
            return change, judge(change, reach, tree, options.timeout)
        finally:
            trees.put(tree)

    ends: dict[Mutation, Verdict] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for done in as_completed([pool.submit(work, change) for change in chosen]):
            change, ends[change] = done.result()
            print(f"{len(ends):3}/{len(chosen)} {line(change, ends[change])}", flush=True)
    print("\nsurvivors:")
    for change in chosen:
        if ends[change].kind in ("survives", "broken"):
            print(line(change, ends[change]))
    counts = Counter(each.kind for each in ends.values())
    share = counts["killed"] / max(1, len(chosen) - counts["equivalent"])
    print(f"{dict(counts)} of {len(chosen)} in {(time.monotonic() - began) / 60:.0f} min: {share:.1%} killed")
    return 0 if share >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
