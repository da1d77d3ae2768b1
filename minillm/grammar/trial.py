"""Compile each new grammar in a process that can be killed, before it is compiled in this process.

Most grammars of reasonable size compile in milliseconds. Some grammars, such as an intersection of expressions or a
large ``multipleOf``, would take hours, and llguidance cannot be interrupted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from minillm.grammar.notation import LIMITS, notation
from minillm.text.safe import clean_line

_CPU_SECONDS = 4  # limit of CPU time; the largest known schema takes 0.1 seconds
_WALL_SECONDS = 60.0  # time limit, long enough for a busy machine
_MEMORY = 2 << 30  # maximum bytes of address space


@lru_cache(maxsize=256)
def check_compiles(kind: str, source: str) -> str | None:
    """Compile a grammar in another process. Return None if the grammar compiles.

    Otherwise return the grammar's fault as the end of a sentence, such as "takes too much memory to compile". Raises
    UsageError if llguidance is not installed, or if a JSON schema is not supported.
    """
    request = {"grammar": notation(kind, source), "limits": LIMITS, "seconds": _CPU_SECONDS, "memory": _MEMORY}
    # -P: a module of the current directory must not replace one of the standard library.
    command = [sys.executable, "-P", str(Path(__file__).with_name("trial_process.py"))]
    late = f"takes more than {_CPU_SECONDS} seconds to compile; make it simpler"
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=_WALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return late
    if done.returncode < 0:
        is_late = done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return late if is_late else "makes the library crash; make it simpler"
    try:
        fault = json.loads(done.stdout)["fault"]
    except (ValueError, KeyError):
        return "takes too much memory to compile; make it simpler"
    return None if fault is None else readable(fault)


def readable(fault: str) -> str:
    """Convert an error message of llguidance to the end of a one-line message, such as "is invalid: …"."""
    if fault.startswith("panic"):
        return "makes the library fail; make it simpler"
    if "invalid regex" in fault and "\nerror: " in fault:
        fault = fault.split("\nerror: ")[1].split("\n")[0]  # without the repeated expression
    return f"is invalid: {clean_line(fault.replace('<non-verbose/>', ''), 300)}"
