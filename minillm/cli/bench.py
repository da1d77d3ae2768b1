"""``minillm bench``: a table of what was measured, or JSON."""

from __future__ import annotations

import argparse
import importlib
import json
from functools import partial
from typing import Any

from minillm.bench.registry import WORKLOADS, ModelOptions, Subject
from minillm.cli.options import add_declared, add_model_options, engine_options, given
from minillm.cli.parser import Parser
from minillm.errors import UsageError
from minillm.system import import_torch


def add_workloads(bench: Parser) -> None:
    """Add a subcommand for every workload; its file is imported when its options are needed."""
    workloads = bench.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    for name, (_, summary) in WORKLOADS.items():
        workload = workloads.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        workload.fill = partial(_add_options, name)


def _file_of(workload: str) -> Any:
    file, _ = WORKLOADS[workload]
    if file != "ui":  # the app's process never imports torch
        import_torch()
    return importlib.import_module(f"minillm.bench.{file}")


def _add_options(workload: str, parser: Parser) -> None:
    options = _file_of(workload).Options
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_declared(parser, options)
    if issubclass(options, ModelOptions):
        add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from minillm.bench.table import plain, show

    file = _file_of(arguments.workload)
    options = file.Options(**given(arguments, file.Options))
    subject = _subject(arguments, options) if isinstance(options, ModelOptions) else None
    result = file.measure(options) if subject is None else file.measure(subject, options)
    if result is None:
        return 0
    if arguments.json:
        print(json.dumps(plain(result)))
    else:
        show(result, str(subject or ""))
    return 0


def _subject(arguments: argparse.Namespace, options: ModelOptions) -> Subject:
    """The model that ``--shape`` or ``--model`` asks for; without either, the smallest shape."""
    if options.shape and arguments.model:
        raise UsageError("give either --shape (random weights) or --model (real ones), not both")
    from minillm.llm import LLM
    from minillm.progress import say

    engine = engine_options(arguments)
    if not arguments.model:
        engine["load_format"] = "dummy"
    name = arguments.model or options.shape or "smollm2-135m"
    return Subject(LLM(name, on_message=say, **engine), name, arguments.workload)
