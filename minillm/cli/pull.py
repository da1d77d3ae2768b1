"""``minillm pull``: fetch a model, showing how far it has come."""

from __future__ import annotations

import argparse

from minillm.progress import loading_bar, say
from minillm.weights.files import find_downloaded, verify
from minillm.weights.manifest import load_manifest
from minillm.weights.resolve import resolve


def run(arguments: argparse.Namespace) -> int:
    manifest = load_manifest()
    name = arguments.model or manifest.default
    manifest.entry(name)
    before = find_downloaded(name)
    with loading_bar() as report:
        files = resolve(name, manifest=manifest, on_progress=report, on_message=say)
        if before is not None and arguments.verify:
            verify(name, report)
    state = "is here already" if before is not None else "is downloaded"
    print(f"{name} {state}: {files.path} (from {files.source})")
    return 0
