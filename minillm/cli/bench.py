"""``minillm bench``: run a benchmark, and print a table or JSON."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from minillm.bench.table import (
    WORKLOADS,
    ModelOptions,
    NoOptions,
    ServerOptions,
    Subject,
    plain,
    show,
    weights,
    workload,
)
from minillm.cli.options import Parser, add_declared, add_model_options, given
from minillm.config import EngineConfig
from minillm.system import import_torch


def add_workloads(bench: Parser) -> None:
    """Add a subcommand for every workload. A workload's module is imported only when its options are needed."""
    workloads = bench.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    for name, (_, summary) in WORKLOADS.items():
        parser = workloads.add_parser(name, help=summary, description=summary)
        parser.fill = [partial(_add_options, name)]


def _workload(name: str) -> tuple[Callable[..., Any], type[NoOptions]]:
    if name != "ui":  # the app's process never imports torch
        import_torch()
    return workload(name)


def _add_options(name: str, parser: Parser) -> None:
    _, options = _workload(name)
    add_declared(parser, options)
    parser.add_argument("--json", action="store_true", help="print JSON")
    if issubclass(options, ModelOptions):
        own = [each.option_strings[-1] for each in parser._actions if each.option_strings]
        add_model_options(parser)
        parser.essential = [*own, "--model", "--device", "--dtype", "--weights", "--kv-cache-dtype", "--speculate"]


def run(arguments: argparse.Namespace) -> int:
    measure, kind = _workload(arguments.workload)
    options = kind(**given(arguments, kind))
    subject = None
    engine = {}
    if isinstance(options, ModelOptions):
        engine = given(arguments, EngineConfig) | weights(options.shape, arguments.model)
    if engine and not isinstance(options, ServerOptions):
        from minillm.llm import LLM
        from minillm.progress import say

        subject = Subject(LLM(on_message=say, **engine), engine["model"], arguments.workload)
    result = measure(subject or engine, options) if engine else measure(options)
    if result is not None and arguments.json:
        print(json.dumps(plain(result)))
    elif result is not None:
        show(result, str(subject or ""))
    return 0
