"""``minillm pull``: fetch a model, showing how far it has come."""

from __future__ import annotations

import argparse

from minillm.progress import loading_bar, say
from minillm.user_config import read_config
from minillm.weights.files import find_downloaded, verify
from minillm.weights.resolve import resolve


def run(arguments: argparse.Namespace) -> int:
    name = read_config(arguments.config).choose_model(arguments.model)
    before = find_downloaded(name)
    with loading_bar() as report:
        files = resolve(name, on_progress=report, on_message=say)
        is_ours = find_downloaded(name) is not None  # else it lies where the user put it
        if is_ours and arguments.verify:
            verify(name, report)
    state = "is downloaded" if is_ours and before is None else "is here already"
    checked = ", every file has its sha256" if is_ours and arguments.verify else ""
    print(f"{name} {state}{checked}: {files.path} (from {files.source})")
    return 0
