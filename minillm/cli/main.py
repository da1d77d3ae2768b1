"""The ``minillm`` command.

Each subcommand lives in a file of its own here; this one only knows their options, so that ``--help`` imports no torch.
Exit codes: 0 done, 1 failed, 2 asked for wrongly, 130 stopped with ctrl-c.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import minillm
from minillm.cli.options import add_model_options, add_sampling_options
from minillm.cli.parser import Parser
from minillm.errors import MinillmError
from minillm.text.safe import clean_line


def _parser() -> Parser:
    parser = Parser(
        prog="minillm",
        description="Llama models on your own machine: chat, batch generation, and a view of the KV cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, add_options) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.fill = add_options
    return parser


def _add_chat_options(chat: Parser) -> None:
    add_model_options(chat)
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument("--plain", action="store_true", help="line by line: for pipes and screen readers")
    chat.add_argument("--resume", action="store_true", help="go on with the latest saved conversation")
    chat.add_argument("--theme", choices=("dark", "light"), help="colours (default: as the terminal says)")
    chat.add_argument("--config", metavar="FILE", help="settings (default: config.toml in the user's directory)")
    add_sampling_options(chat)


def _add_demo_options(demo: Parser) -> None:
    demo.add_argument("--speed", type=float, default=1.0, metavar="X", help="above 1: faster (1)")
    demo.add_argument("--model", metavar="NAME", help="name from `minillm models`, model directory, or .gguf file")
    demo.add_argument("--theme", choices=("dark", "light"), help="colours (default: as the terminal says)")


def _add_generate_options(generate: Parser) -> None:
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete")
    generate.add_argument("-f", "--file", metavar="FILE", help="read prompts from FILE ('-': standard input)")
    form = generate.add_mutually_exclusive_group()
    form.add_argument(
        "--lines", action="store_true", help="every line of the file is a prompt (else the whole text is)"
    )
    form.add_argument("--jsonl", action="store_true", help="every line is a JSON request (implied by the name *.jsonl)")
    generate.add_argument("--chat", action="store_true", help="wrap each prompt as a user's message of a chat")
    generate.add_argument("--system", metavar="TEXT", help="system prompt; implies --chat")
    generate.add_argument("--json", action="store_true", help="write one JSON object per prompt")
    generate.add_argument(
        "-o", "--output", metavar="FILE", help="write JSON objects to FILE; a run that was stopped goes on from there"
    )
    generate.add_argument(
        "--data-parallel", action="store_true", help="share the prompts among the replicas that torchrun has started"
    )
    generate.add_argument("--quiet", action="store_true", help="no progress bar")
    add_model_options(generate)
    add_sampling_options(generate)


def _add_models_options(models: Parser) -> None:
    models.add_argument("--json", action="store_true", help="write one JSON object per model")


def _add_pull_options(pull: Parser) -> None:
    pull.add_argument(
        "model", nargs="?", metavar="NAME", help="a name from `minillm models` (default: the default model)"
    )
    pull.add_argument("--verify", action="store_true", help="check the files' sha256 even if they are there already")


def _add_info_options(info: Parser) -> None:
    info.add_argument("--json", action="store_true", help="write JSON")


def _add_bench_options(bench: Parser) -> None:
    from minillm.cli.bench import add_workloads

    add_workloads(bench)


_COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "chat": ("talk to a model in the terminal, and watch its block tables", _add_chat_options),
    "demo": ("a guided tour of the cache on the real engine, in the terminal", _add_demo_options),
    "generate": ("complete prompts: arguments, a file, or standard input", _add_generate_options),
    "models": ("list the models of weights.toml and which are downloaded", _add_models_options),
    "pull": ("download a model", _add_pull_options),
    "info": ("versions, devices and directories: the first thing to put into a bug report", _add_info_options),
    "bench": ("measure speed", _add_bench_options),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code; prints errors that a user can cause as one line."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        arguments = _parser().parse_args(argv)
        if arguments.version:
            print(f"minillm {minillm.__version__}")
            return 0
        if arguments.command is None:
            _parser().print_help()
            return 2
        return int(importlib.import_module(f"minillm.cli.{arguments.command}").run(arguments))
    except MinillmError as error:
        print(f"minillm: error: {clean_line(str(error), 1000)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("minillm: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away. Point stdout elsewhere, or the interpreter complains when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("MINILLM_DEBUG"):
            raise
        what = clean_line(f"{type(error).__name__}: {error}", 500)
        print(f"minillm: internal error: {what} (set MINILLM_DEBUG=1 for the whole story)", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
