"""``minillm models``: what weights.toml lists, and what is downloaded."""

from __future__ import annotations

import argparse
import json

from minillm.progress import size
from minillm.weights.files import find_downloaded
from minillm.weights.manifest import ModelEntry, load_manifest


def run(arguments: argparse.Namespace) -> int:
    manifest = load_manifest()
    rows = [_row(entry, entry.name == manifest.default) for entry in manifest.models.values()]
    if arguments.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    print(f"{'name':28}{'size':>9}  {'licence':21}{'gated':7}{'downloaded'}")
    for row in rows:
        gated, here = "yes" if row["gated"] else "no", row["path"] or "no"
        default = " (default)" if row["default"] else ""
        print(f"{row['name'] + default:28}{size(row['size']):>9}  {row['license']:21}{gated:7}{here}")
    return 0


def _row(entry: ModelEntry, is_default: bool) -> dict:
    files = find_downloaded(entry.name)
    return {
        "name": entry.name,
        "description": entry.description,
        "parameters": entry.parameters,
        "size": entry.size,
        "license": entry.license,
        "gated": entry.gated,
        "default": is_default,
        "path": None if files is None else str(files.path),
        "source": None if files is None else files.source,
    }
