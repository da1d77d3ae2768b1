"""``minillm bench``: a table of what was measured, or JSON."""

from __future__ import annotations

import argparse
import importlib
import json
from functools import partial
from typing import Any

from minillm.bench.registry import WORKLOADS, ModelOptions, Subject, Workload
from minillm.cli.options import add_declared, add_model_options, engine_options, given
from minillm.cli.parser import Parser
from minillm.errors import UsageError
from minillm.interrupt import import_torch


def add_workloads(bench: Parser) -> None:
    """Add a subcommand for every workload; its file is imported when its options are needed."""
    workloads = bench.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    for name, _, summary in WORKLOADS:
        workload = workloads.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        workload.fill = partial(_add_options, name)


def _workload(wanted: str) -> Workload:
    file = next(file for name, file, _ in WORKLOADS if name == wanted)
    found: Workload = importlib.import_module(f"minillm.bench.{file}").WORKLOADS[wanted]
    return found


def _add_options(name: str, parser: Parser) -> None:
    options = _workload(name).options
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_declared(parser, options)
    if issubclass(options, ModelOptions):
        add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from minillm.bench.table import plain, show

    workload = _workload(arguments.workload)
    options = workload.options(**given(arguments, workload.options))
    on_model = isinstance(options, ModelOptions)
    if on_model and options.shape and arguments.model:
        raise UsageError("give either --shape (random weights) or --model (real ones), not both")
    if arguments.workload != "ui":  # the app's process never imports torch
        import_torch()
    heading = ""
    if on_model:
        subject = _subject(arguments, options)
        heading = f"{arguments.workload}: {subject}"
        result = workload.measure(subject, options)
    else:
        result = workload.measure(options)
    if result is None:
        return 0
    if arguments.json:
        print(json.dumps(plain(result)))
    else:
        show(result, heading)
    return 0


def _subject(arguments: argparse.Namespace, options: ModelOptions) -> Subject:
    """The model that ``--shape`` or ``--model`` asks for; without either, the smallest shape."""
    from minillm.llm import LLM
    from minillm.progress import loading_bar, say

    engine: dict[str, Any] = engine_options(arguments)
    if not arguments.model:
        engine["load_format"] = "dummy"
    name = arguments.model or options.shape or "smollm2-135m"
    with loading_bar() as report:
        return Subject(LLM(name, on_progress=report, on_message=say, **engine), name)
