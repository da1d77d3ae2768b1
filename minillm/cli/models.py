"""``minillm models``, ``show``, ``pull`` and ``rm``: list, describe, download and delete models."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm import system
from minillm.blockstore.files import blocks_dir
from minillm.cli.cache import remove_blocks
from minillm.config import EngineConfig
from minillm.errors import WeightsError
from minillm.fit.sizes import SizedModel, sized, sized_entry
from minillm.fit.verdicts import IN_LOW_BITS, DeviceMemory, Verdict, devices_of, verdicts
from minillm.loading.bandwidth import kept_rate, known_rate
from minillm.progress import loading_bar, rate, say, size
from minillm.system import import_torch
from minillm.text.safe import clean_line
from minillm.user_config import read_config
from minillm.weights.files import ModelFiles, downloaded, find_downloaded, remove, size_on_disk, verify
from minillm.weights.manifest import ModelEntry, load_manifest
from minillm.weights.resolve import describe, find, resolve


def models(arguments: argparse.Namespace) -> int:
    """List the named models and the downloaded models. Show which of them fit this machine."""
    manifest, gpu, config = load_manifest(), _gpu_memory(), EngineConfig(**read_config().engine)
    devices = _devices(config, gpu)
    here = {files.name: files for files in downloaded()}
    groups = [entry.all_forms() for entry in manifest.models.values()]
    listed = {form.name for group in groups for form in group}
    groups += [[ModelEntry.unlisted(name)] for name in here if name not in listed]
    rows = []
    for group in groups:
        sizes = [_sized(manifest.entry(each.name), here.get(each.name)) for each in group]
        for each, verdict in zip(group, verdicts(sizes, devices), strict=True):
            is_default = each.name == manifest.default
            rows.append({**_row(each, here.get(each.name)), "default": is_default, **_facts(verdict)})
    if arguments.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    print(f"{'name':34}{'size':>9}  {'fits':12}{'tokens/s':>8}  {'license':21}{'gated':7}{'downloaded'}")
    with_forms = {entry.name for entry in manifest.models.values() if entry.forms}
    for row in rows:
        base, _, form = clean_line(row["name"]).partition(":")
        name = f"  :{form}" if form and base in manifest.models else base + (" (default)" if row["default"] else "")
        gated, path = "yes" if row["gated"] else "no", clean_line(row["path"] or "no", 1000)
        fits = "CPU*" if row["fits"] == IN_LOW_BITS else row["fits"]
        fits += ", taken" if row["taken"] and row["name"].partition(":")[0] in with_forms else ""
        speed = rate(row["tokens_per_second"])
        print(f"{name:34}{size(row['size']):>9}  {fits:12}{speed:>8}  {row['license']:21}{gated:7}{path}")
    memory = size(system.memory()[0])
    print(f"fits: this machine has {memory} of memory free, and {f'a GPU with {size(gpu)}' if gpu else 'no GPU'}")
    print("taken: a chat with the name alone loads this quantization")
    if any(row["fits"] == IN_LOW_BITS for row in rows):
        print("CPU*: fits only quantized, with --weights stored or int8; `minillm fit MODEL` shows which")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print facts about a model without loading its weights."""
    name, manifest = read_config(arguments.config).choose_model(arguments.model), load_manifest()
    found = find(name, manifest)
    if isinstance(found, ModelEntry):
        facts = {**_row(found, None), "source": ", or ".join(map(describe, found.sources))}
    else:
        details = _details(found)  # first: it rejects a directory without a model before all its files are counted
        facts = _row(manifest.entry(name) or ModelEntry.unlisted(name), found)
        facts |= {key: value for key, value in details.items() if value}
    listed = manifest.entry(name)
    if listed is not None and listed.forms:
        facts["forms"] = {form.form: form.size for form in listed.all_forms()}
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    facts["forms"] = ", ".join(f"{form} ({size(number)})" for form, number in facts.get("forms", {}).items())
    facts |= {"size": size(facts["size"]) if facts["size"] else "", "gated": "yes" if facts["gated"] else ""}
    facts["path"] = facts["path"] or "not downloaded"
    for key, value in facts.items():
        if value not in ("", None):
            shown = "yes" if value is True else f"{value:,}" if type(value) is int else value
            print(f"{key.replace('_', ' '):22}{clean_line(shown, 300)}")
    return 0


def pull(arguments: argparse.Namespace) -> int:
    """Download a model and show the progress."""
    name = load_manifest().canonical(read_config(arguments.config).choose_model(arguments.model))
    before = find_downloaded(name)
    with loading_bar() as report:
        files = resolve(name, on_progress=report, on_message=say)
        is_ours = find_downloaded(name) is not None  # otherwise it is a path of the user
        if is_ours and arguments.verify:
            verify(name, report)
    state = "is downloaded" if is_ours and before is None else "is here already"
    checked = ", every file has its sha256" if is_ours and arguments.verify else ""
    print(clean_line(f"{name} {state}{checked}: {files.path} (from {files.source})", 1000))
    return 0


def rm(arguments: argparse.Namespace) -> int:
    """Delete downloaded models."""
    for name in map(load_manifest().canonical, arguments.downloaded):
        freed = remove(name)
        freed += remove_blocks(blocks_dir(), name)
        print(clean_line(f"{name} is deleted: {size(freed)} are free again"))
    return 0


def _devices(config: EngineConfig, gpu: int) -> list[DeviceMemory]:
    """Return this machine's devices with their memory bandwidths. ``gpu`` is the largest GPU's memory in bytes, or 0.

    Bandwidths are measured if no earlier measurement is stored.
    """
    speed = kept_rate(system.processor())
    if speed is None or gpu:
        import_torch()
        import torch

        speed = known_rate(torch.device("cpu"))
        gpu_speed = known_rate(torch.device("cuda")) if gpu and torch.cuda.is_available() else None
        return devices_of(config, system.memory(), gpu, speed, gpu_speed)
    return devices_of(config, system.memory(), cpu_bandwidth=speed)


def _sized(entry: ModelEntry | None, files: ModelFiles | None) -> SizedModel | None:
    try:
        return sized_entry(entry) if entry else sized(files.name, files.path) if files else None
    except WeightsError:
        return None


def _facts(verdict: Verdict) -> dict[str, Any]:
    return {"fits": verdict.where, "tokens_per_second": verdict.tokens_per_second, "taken": verdict.taken}


def _row(entry: ModelEntry, files: ModelFiles | None) -> dict[str, Any]:
    """Return facts about a model from its entry in the manifest, as fields for JSON. The field ``size`` is in bytes.

    ``files``: the model's files, or None if it is not downloaded.
    """
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


def _details(files: ModelFiles) -> dict[str, Any]:
    """Return further facts about a model, read from its files.

    Raises WeightsError if the files are damaged, or the model is not supported.
    """
    import_torch()
    from minillm.model.config import ModelConfig
    from minillm.text.tokenizer import Tokenizer
    from minillm.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(files)
    config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
    source = checkpoint.tokenizer_source
    tokenizer = Tokenizer.load(source, config.vocab_size)
    stored: Counter[str] = Counter()
    for name in checkpoint.names():
        stored[checkpoint.stored_as(name)] += math.prod(checkpoint.shape(name))
    shares = [(kind, count / stored.total()) for kind, count in stored.most_common()]
    return {
        "license": str(source.get("general.license", "")) if isinstance(source, Mapping) else "",
        "parameters": f"{config.num_parameters / 1e6:,.0f}M",
        "stored_as": ", ".join(f"{kind} ({share:.0%})" for kind, share in shares if share >= 0.005),
        "context": config.longest_context,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_heads}, with {config.num_kv_heads} of keys and values",
        "vocabulary": config.vocab_size,
        "cache_per_token": " and ".join(f"{size(config.kv_bytes_per_token(n))} in {8 * n} bits" for n in (2, 1)),
        "chat_template": tokenizer is not None and tokenizer.has_chat_template,
    }


def _gpu_memory() -> int:
    """Return the memory of the largest GPU in bytes, or 0 without a GPU.

    If there is no GPU driver, torch is not imported, because the import takes seconds.
    """
    if not Path("/proc/driver/nvidia/version").exists():
        return 0
    import_torch()
    import torch

    indices = range(torch.cuda.device_count())
    return max((torch.cuda.get_device_properties(index).total_memory for index in indices), default=0)
