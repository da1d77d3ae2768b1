"""``minillm info``: print versions, devices and directories."""

import argparse
import importlib.metadata
import json
import platform
import sys
from typing import Any

import minillm
from minillm import system
from minillm.progress import size
from minillm.system import import_torch
from minillm.text.safe import clean_line

PACKAGES = ("torch", "triton", "tokenizers", "safetensors", "huggingface-hub", "gguf", "jinja2", "textual")


def run(arguments: argparse.Namespace) -> int:
    facts = _collect()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for section, values in facts.items():
        print(section)
        for name, value in values.items():
            print(f"  {clean_line(name):<17} {clean_line(str(value), 1000)}")
    return 0


def _collect() -> dict[str, dict[str, Any]]:
    import_torch()
    import torch

    from minillm.system import cache_dir, config_dir, data_dir
    from minillm.weights.files import downloaded, size_on_disk

    versions = {"minillm": minillm.__version__, "python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    threads, (available, total) = torch.get_num_threads(), system.memory()
    devices: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": f"{system.processor()}, {threads} thread{'' if threads == 1 else 's'}",
        "memory": f"{size(available)} of {size(total)} free",
        "cuda": torch.version.cuda or "torch is built without CUDA",
    }
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        memory = f"{size(free)} of {size(total)} free"
        devices[f"cuda:{index}"] = f"{name}, compute capability {major}.{minor}, {memory}"
    models = {files.name: f"{size(size_on_disk(files.path))}, from {files.source}" for files in downloaded()}
    return {
        "versions": versions,
        "devices": devices,
        "models": models or {"none": "downloaded; `minillm pull` downloads one"},
        "directories": {"cache": str(cache_dir()), "configuration": str(config_dir()), "data": str(data_dir())},
    }
