"""``minillm fit``: show which models and quantizations fit this or another machine, and how fast they would run."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm import system
from minillm.checks import parse_bytes
from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.fit.budget import Budget, Fit
from minillm.fit.sizes import READING_SPEED, SizedModel, in_low_bits, quantized, ranked, sized, sized_versions
from minillm.fit.verdicts import budget_before_start
from minillm.fit.weights import QUANTIZED
from minillm.loading.bandwidth import Bandwidth, measure
from minillm.progress import rate, size
from minillm.system import import_torch
from minillm.text.safe import clean_line
from minillm.user_config import read_config
from minillm.weights.files import ModelFiles
from minillm.weights.manifest import FULL, load_manifest
from minillm.weights.resolve import find


@dataclass(frozen=True)
class Machine:
    """The device on which the models should fit.

    Attributes:
        about: a description for the user.
        budget: the device's memory, and the part of it that a model may use.
        bandwidth: memory bandwidth in bytes per second; None if not known.
        draft_read: the bytes that the draft model reads per token; 0 without a draft model. Speculation cannot speed up
            a model that reads no more bytes than this.
    """

    about: str
    budget: Budget
    bandwidth: float | None
    draft_read: int = 0

    def drafts_for(self, fit: Fit) -> bool:
        """Return whether the draft model reads fewer bytes per token than the model. True without a draft model."""
        return fit.weights.read > self.draft_read


@dataclass(frozen=True)
class FitRow:
    """A row of the table that `minillm fit` prints: one quantization of a model, or the unquantized model.

    ``best``: this row is recommended among all rows of the same model.
    """

    model: SizedModel
    fit: Fit
    tokens_per_second: float | None
    best: bool


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Invalid values are reported before anything is measured."""
    options = dict(read_config(arguments.config).engine)
    if arguments.context is not None and arguments.context < 1:
        raise UsageError(f"--context must be at least 1 token, not {arguments.context}")
    given = {
        "device": arguments.device, "max_model_len": arguments.context, "kv_cache_dtype": arguments.kv_cache_dtype,
        "speculate": arguments.speculate,
    }  # fmt: skip
    config = EngineConfig(**{**options, **{name: value for name, value in given.items() if value is not None}})
    memory, bandwidth = parse_bytes("--memory", arguments.memory), parse_bytes("--bandwidth", arguments.bandwidth, "/s")
    name = arguments.model or None  # empty, as with an unset variable: as without a name
    groups = _models(name)
    draft = None if config.draft is None else _draft(config.draft)
    machine = _machine(config, memory, bandwidth)
    if draft is not None:
        machine = _with_draft_loaded(draft, machine)
    if machine.budget.on_gpu:  # on a GPU, --quantize can quantize a model that has no quantized files
        groups = [[*group, *quantized(group[0])] if len(group) == 1 else group for group in groups]
    else:
        groups = [[way for each in group for way in (each, *in_low_bits(each, machine.budget))] for group in groups]
    tables = [_rows(group, machine) for group in groups]
    if arguments.json:
        print(json.dumps(_as_json(machine, tables), indent=2))
        return 0
    print(machine.about)
    _show(tables, machine)
    if name is not None:
        for faster in _faster(tables[0]):
            print(f"with {rate(faster.tokens_per_second)} tokens/s: {faster.model.command}")
        print(_advice(tables[0], machine, name))
    return 0


def _models(name: str | None) -> list[list[SizedModel]]:
    """Return the models to show. Each model is a list of its variants: unquantized, and its quantizations.

    Without a name, return all named models. Raises UsageError if the size of the model ``name`` is unknown.
    """
    manifest = load_manifest()
    if name is None:
        return [forms for entry in manifest.models.values() if (forms := sized_versions(entry))]
    found = find(name, manifest)
    if (entry := manifest.entry(name)) is not None:
        forms = sized_versions(entry if ":" not in name else replace(entry, forms=()))
    elif isinstance(found, ModelFiles):
        forms = [sized(name, found.path, downloaded=True)]
    else:
        forms = []
    if not forms:
        shown = clean_line(name)
        raise UsageError(f"{shown} is not downloaded, so its size is unknown; `minillm pull {shown}` downloads it")
    return [forms]


def _draft(name: str) -> SizedModel:
    base, _, kind = name.rpartition(":")
    if kind in QUANTIZED:
        return replace(_models(base)[0][0], quantize=kind)
    return _models(name)[0][0]


def _with_draft_loaded(draft: SizedModel, machine: Machine) -> Machine:
    """Return ``machine`` as it is after a draft model is loaded on it: with less free memory.

    The draft model is loaded with the options that `minillm.loading.describe.describe_draft` uses.
    """
    in_8_bits = not machine.budget.on_gpu and machine.budget.element_size == 4
    own = replace(machine.budget.config, speculate="off", quantize=None, weights="int8" if in_8_bits else "stored")
    weights = draft.weights(replace(machine.budget, config=own))
    budget = machine.budget.with_draft(weights, draft.shape)
    taken = f"{size(budget.draft_bytes)} and {size(budget.draft_bytes_per_token)} per token of context"
    about = f"{machine.about}; the draft model {_name(draft)} takes {taken}"
    return replace(machine, budget=budget, about=about, draft_read=weights.read)


def _machine(config: EngineConfig, memory: int | None, bandwidth: int | None) -> Machine:
    """Return the device on which the models should fit: this machine's GPU, or its CPU if it has no GPU.

    With ``memory``, return an imaginary device with that many bytes of memory, all free. ``bandwidth``, in bytes per
    second, is used instead of a measured bandwidth.
    """
    gpu_here = _gpu_is_here()
    on_gpu = config.device != "cpu" and (gpu_here or memory is not None or config.device != "auto")
    if on_gpu and memory is None:
        return _this_gpu(config, bandwidth)
    free, total = system.memory() if memory is None else (memory, memory)
    budget = budget_before_start(config, free, total, on_gpu)
    speed = None if bandwidth is None else Bandwidth(bandwidth)
    if speed is None and (gpu_here or not on_gpu):
        speed = _measured("cuda" if on_gpu else "cpu")
    kind = "GPU" if on_gpu else "CPU"
    here = f"this machine's CPU, with {size(total)} of memory, {size(budget.available)} free for a model"
    other = f"a {kind} with {size(total)}, {size(budget.available)} of it for the model"
    about = here if memory is None else other
    return Machine(about + _rate(speed, bandwidth), budget, None if speed is None else speed.rate)


def _gpu_is_here() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _this_gpu(config: EngineConfig, bandwidth: int | None) -> Machine:
    import_torch()
    import torch

    from minillm.loading.device import choose_device, choose_dtype
    from minillm.loading.pool_size import budget_of

    device = choose_device(config)
    budget = budget_of(config, device, choose_dtype(config, device))
    speed = Bandwidth(bandwidth) if bandwidth else _measured(str(device))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"
    about = f"{name}, {size(budget.free)} of {size(budget.total)} free"
    return Machine(about + _rate(speed, bandwidth), budget, speed.rate)


def _measured(device: str) -> Bandwidth:
    import_torch()
    import torch

    return measure(torch.device(device))


def _rate(speed: Bandwidth | None, given: int | None) -> str:
    if speed is None:
        return "; --bandwidth adds tokens per second"
    source = "" if given else " (best measured; the machine is busy now)" if speed.is_busy else " (measured)"
    return f"; it reads {speed.rate / 1e9:,.{0 if speed.rate >= 1e11 else 1}f} GB/s{source}"


def _rows(models: list[SizedModel], machine: Machine) -> list[FitRow]:
    # On a CPU, the chat prefers a variant that needs no further options. If such a variant fits, the best row is one.
    plain = [model for model in models if machine.budget.on_gpu or not model.options]
    order = _order(plain, machine) or _order(models, machine)
    rows = []
    for model in models:
        fit = model.fit(machine.budget)
        if not machine.drafts_for(fit):
            fit = replace(fit, fits=False, context=0)
        speed = None
        if machine.bandwidth is not None and fit.fits:
            speed = machine.budget.tokens_per_second(fit, model.shape, machine.bandwidth)
        rows.append(FitRow(model, fit, speed, bool(order) and model is order[0][0]))
    return rows


def _order(models: list[SizedModel], machine: Machine) -> list[tuple[SizedModel, Fit]]:
    return [each for each in ranked(models, machine.budget, machine.bandwidth) if machine.drafts_for(each[1])]


def _name(model: SizedModel) -> str:
    return clean_line(model.name, 60) + model.options


def _show(tables: list[list[FitRow]], machine: Machine) -> None:
    width = max(32, *(len(_name(row.model)) + 3 for rows in tables for row in rows))
    speed = f"{'tokens/s':>10}" if machine.bandwidth is not None else ""
    print(f"{'model':{width}}{'file':>10}{'weights':>10}  {'context':20}{speed}  fits")
    for rows in tables:
        for row in rows:
            base, _, form = row.model.name.partition(":")
            name = (
                f"  :{form}{row.model.options}"
                if form and row is not rows[0] and rows[0].model.name == base
                else _name(row.model)
            )
            context = f"{row.fit.context:,} of {row.model.shape.context:,}" if row.fit.fits else "-"
            speed = "" if machine.bandwidth is None else f"{rate(row.tokens_per_second):>10}"
            file, weights = size(row.model.size), size(row.fit.weights.memory)
            marks = f"yes{', best' if row.best and len(rows) > 1 else ''}" if row.fit.fits else "no"
            marks += "" if machine.drafts_for(row.fit) else ", its draft model reads as much"
            here = ", here" if row.model.downloaded else ""
            here += f", with a copy of {size(row.fit.copied)} in 16 bits" if row.fit.copied else ""
            print(f"{name:{width}}{file:>10}{weights:>10}  {context:20}{speed}  {marks}{here}")


def _faster(rows: list[FitRow]) -> list[FitRow]:
    """Return a faster variant to suggest, as a list with one row; empty if there is no suggestion.

    If the best row is slower than reading speed, an option such as ``--weights`` may help. The suggested row is the
    largest variant that reaches reading speed with such an option.
    """
    best = next((row.tokens_per_second for row in rows if row.best), None)
    if best is None or best >= READING_SPEED:
        return []
    fast = [row for row in rows if row.model.options and (row.tokens_per_second or 0) >= READING_SPEED]
    return sorted(fast, key=lambda row: (row.fit.fits_conversation, row.model.size), reverse=True)[:1]


def _advice(rows: list[FitRow], machine: Machine, name: str) -> str:
    """Return a line of text for the user: the command that runs the best row.

    If no row fits, the line gives the reason, usually the memory that is missing for the smallest variant.
    """
    best = next((row for row in rows if row.best), None)
    if best is None:
        row = min(rows, key=lambda row: row.fit.needed)
        lacks = size(row.fit.needed - machine.budget.available)
        if not machine.drafts_for(row.fit):
            return "none fits: the draft model must be smaller than the model"
        if row.fit.needed <= machine.budget.available:
            return f"none fits with a context of {machine.budget.config.max_model_len:,} tokens"
        return f"none fits: {_name(row.model)} needs {size(row.fit.needed)}, {lacks} more than available"
    form = "" if ":" in best.model.name or len(rows) == 1 or best.model.quantize else f":{FULL}"
    is_listed = load_manifest().entry(name) is not None
    config, options = machine.budget.config, ""
    if config.kv_cache_dtype != "auto":
        options += f" --kv-cache-dtype {config.kv_cache_dtype}"
    if config.max_model_len is not None:
        options += f" --max-model-len {config.max_model_len}"
    if config.speculate != "off":
        options += f" --speculate {shlex.quote(config.speculate)}"
    return replace(best.model, name=best.model.name + (form if is_listed else "")).command + options


def _as_json(machine: Machine, tables: list[list[FitRow]]) -> dict[str, Any]:
    budget = machine.budget
    return {
        "device": "gpu" if budget.on_gpu else "cpu",
        "memory": budget.total,
        "available": budget.available,
        "bandwidth": machine.bandwidth,
        "models": [
            {
                "name": row.model.name,
                "form": row.model.name.partition(":")[2] or FULL,
                "quantize": row.model.quantize or None,
                "held": row.model.layout(budget).storage,
                "file": row.model.size,
                "weights": row.fit.weights.memory,
                "copy": row.fit.copied,
                "steps": row.fit.steps,
                "needed": row.fit.needed,
                "context": row.fit.context,
                "model_context": row.model.shape.context,
                "tokens_per_second": row.tokens_per_second,
                "fits": row.fit.fits,
                "best": row.best,
                "downloaded": row.model.downloaded,
            }
            for rows in tables
            for row in rows
        ],
    }
