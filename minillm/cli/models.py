"""``minillm models``: those of weights.toml and those that are downloaded, and which of them this machine can hold."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from minillm import system
from minillm.progress import size
from minillm.system import import_torch
from minillm.weights.files import ModelFiles, downloaded, size_on_disk
from minillm.weights.manifest import ModelEntry, load_manifest

# What a model takes beside its weights: torch, a cache of some thousand tokens, and on a GPU the steps' own needs.
_CPU_SHARE, _CPU_BYTES = 1.2, 1e9
_GPU_SHARE, _GPU_BYTES = 1.1, 2e9


def run(arguments: argparse.Namespace) -> int:
    manifest, memory, gpu = load_manifest(), system.memory()[1], _gpu_memory()
    here = {files.name: files for files in downloaded()}
    others = [ModelEntry.unlisted(name) for name in here if name not in manifest.models]
    rows = [row(entry, here.get(entry.name)) for entry in (*manifest.models.values(), *others)]
    for each in rows:
        each["default"] = each["name"] == manifest.default
        on_gpu, on_cpu = _GPU_SHARE * each["size"] + _GPU_BYTES, _CPU_SHARE * each["size"] + _CPU_BYTES
        each["fits"] = "GPU" if on_gpu <= gpu else "CPU" if on_cpu <= memory else "no"
    if arguments.json:
        for each in rows:
            print(json.dumps(each))
        return 0
    print(f"{'name':34}{'size':>9}  {'fits':6}{'licence':21}{'gated':7}{'downloaded'}")
    for each in rows:
        name = each["name"] + (" (default)" if each["default"] else "")
        gated, path = "yes" if each["gated"] else "no", each["path"] or "no"
        print(f"{name:34}{size(each['size']):>9}  {each['fits']:6}{each['license']:21}{gated:7}{path}")
    print(f"fits: this machine has {size(memory)} of memory, and {f'a GPU with {size(gpu)}' if gpu else 'no GPU'}")
    return 0


def row(entry: ModelEntry, files: ModelFiles | None) -> dict[str, Any]:
    """A model as one object, with its ``files`` where they are here. ``size`` in bytes."""
    return {
        "name": entry.name,
        "description": entry.description,
        "parameters": entry.parameters,
        "size": entry.size or (0 if files is None else size_on_disk(files.path)),
        "license": entry.license,
        "gated": entry.gated,
        "path": None if files is None else str(files.path),
        "source": None if files is None else files.source,
    }


def _gpu_memory() -> int:
    """Bytes of the largest GPU. Without a driver torch is not imported, which takes seconds."""
    if not Path("/proc/driver/nvidia/version").exists():
        return 0
    import_torch()
    import torch

    indices = range(torch.cuda.device_count())
    return max((torch.cuda.get_device_properties(index).total_memory for index in indices), default=0)
