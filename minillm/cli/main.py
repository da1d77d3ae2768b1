"""The ``minillm`` command.

Each subcommand lives in a file of its own here; this one only knows their options, so that ``--help`` imports no torch.
Exit codes: 0 done, 1 failed, 2 asked for wrongly, 130 stopped with ctrl-c.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import minillm
from minillm.cli.options import (
    MODEL_NAMES,
    add_config_option,
    add_model_option,
    add_model_options,
    add_sampling_options,
)
from minillm.cli.parser import Parser
from minillm.cli.streams import let_go, settle
from minillm.errors import MinillmError, UsageError, memory_errors
from minillm.text.safe import clean_line


def command_parser() -> Parser:
    """The parser of the whole command."""
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
    chat.add_argument("question", nargs="?", metavar="QUESTION", help="ask this first")
    add_model_options(chat)
    chat.add_argument("-s", "--system", metavar="TEXT", help="system prompt")
    chat.add_argument("--plain", action="store_true", help="line by line: for pipes and screen readers")
    chat.add_argument("--resume", action="store_true", help="go on with the latest saved conversation")
    _add_theme(chat)
    add_config_option(chat)
    add_sampling_options(chat)


def _add_demo_options(demo: Parser) -> None:
    demo.add_argument("--speed", type=float, default=1.0, metavar="X", help="above 1: faster (1)")
    add_model_option(demo)
    add_config_option(demo)
    _add_theme(demo)


def _add_theme(parser: Parser) -> None:
    parser.add_argument("--theme", choices=("dark", "light"), help="colours (default: as the terminal says)")


def _add_generate_options(generate: Parser) -> None:
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT",
        help="text to complete; what a pipe or a file brings on standard input is put after it, behind a blank line",
    )  # fmt: skip
    generate.add_argument("-f", "--file", metavar="FILE", help="read prompts from FILE ('-': standard input)")
    form = generate.add_mutually_exclusive_group()
    form.add_argument(
        "--lines", dest="form", action="store_const", const="lines",
        help="every line of the file is a prompt (else the whole text is)",
    )  # fmt: skip
    form.add_argument(
        "--jsonl", dest="form", action="store_const", const="jsonl",
        help="every line is a JSON request (implied by the name *.jsonl)",
    )  # fmt: skip
    generate.add_argument("--chat", action="store_true", help="wrap each prompt as a user's message of a chat")
    generate.add_argument("-s", "--system", metavar="TEXT", help="system prompt; implies --chat")
    generate.add_argument(
        "--parse-special", action="store_true",
        help="control tokens that a raw prompt spells (<|im_end|>) are control tokens: for text that you trust",
    )  # fmt: skip
    generate.add_argument("--json", action="store_true", help="write one JSON object per prompt")
    generate.add_argument(
        "-o", "--output", metavar="FILE", help="write JSON objects to FILE; a run that was stopped goes on from there"
    )
    generate.add_argument("--force", action="store_true", help="overwrite an --output that is finished")
    generate.add_argument(
        "--data-parallel", action="store_true", help="share the prompts among the replicas that torchrun has started"
    )
    generate.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    add_config_option(generate)
    add_model_options(generate)
    add_sampling_options(generate)


def _add_models_options(models: Parser) -> None:
    models.add_argument("--json", action="store_true", help="write one JSON object per model")


def _add_pull_options(pull: Parser) -> None:
    _add_name(pull)
    pull.add_argument("--verify", action="store_true", help="check the files' sha256 even if they are there already")


def _add_show_options(show: Parser) -> None:
    _add_name(show)
    show.add_argument("--json", action="store_true", help="write JSON")


def _add_name(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME", help=f"{MODEL_NAMES} (default: the default model)")
    add_config_option(parser)


def _add_rm_options(rm: Parser) -> None:
    rm.add_argument("downloaded", nargs="+", metavar="NAME", help="downloaded models")


def _add_info_options(info: Parser) -> None:
    info.add_argument("--json", action="store_true", help="write JSON")


def _add_completions_options(completions: Parser) -> None:
    completions.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help="print what this shell's startup file sources"
    )
    completions.add_argument(
        "words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )  # of a line: print what the last one may be


def _add_bench_options(bench: Parser) -> None:
    from minillm.cli.bench import add_workloads

    add_workloads(bench)


_COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "chat": ("talk to a model in the terminal, and watch its block tables", _add_chat_options),
    "demo": ("a guided tour of the cache on the real engine, in the terminal", _add_demo_options),
    "generate": ("complete prompts: arguments, a file, or standard input", _add_generate_options),
    "models": (
        "list the models that have a name: which are downloaded, and which fit this machine",
        _add_models_options,
    ),
    "show": ("what there is to know about a model, without loading it", _add_show_options),
    "pull": ("download a model", _add_pull_options),
    "rm": ("delete downloaded models", _add_rm_options),
    "info": ("versions, devices and directories: the first thing to put into a bug report", _add_info_options),
    "bench": ("measure speed: as its flags say, without config.toml", _add_bench_options),
    "completions": ("a script that completes this command's words in bash, zsh or fish", _add_completions_options),
}


_WHILE_WRITING = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EBADF, errno.EIO)  # files are named by their errors


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code; prints errors that a user can cause as one line."""
    settle()
    code = _guarded(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        let_go(stream)
    return code


def _guarded(argv: Sequence[str]) -> int:
    """Run, and make one line of whatever goes wrong."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except MinillmError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("stopped", 130, "")
    except BrokenPipeError:  # the reader of our output went away
        return 1
    except OSError as error:  # of the machine: a full disk, no permission, too many open files
        where = error.filename or ("cannot write to standard output" if error.errno in _WHILE_WRITING else "")
        return _say(f"{where}: {error.strerror or error}".removeprefix(": "))
    except Exception as error:
        if os.environ.get("MINILLM_DEBUG"):
            raise
        if isinstance(error, ImportError) and not str(error.name).startswith("minillm"):
            return _say(_not_imported(error))
        what = f"{type(error).__name__}: {clean_line(str(error), 500)}"
        return _say(f"{what} (set MINILLM_DEBUG=1 for the whole story)", kind="internal error: ")


@memory_errors()
def _run(argv: Sequence[str]) -> int:
    try:
        arguments = command_parser().parse_args(argv)
    except SystemExit:  # --help
        return 0
    if arguments.version:
        print(f"minillm {minillm.__version__}")
        return 0
    if arguments.command is None:
        command_parser().print_help()
        return 2
    try:
        os.getcwd()
    except OSError:  # libraries that torch loads end the process
        raise UsageError("the current directory does not exist any more; change to another one") from None
    return int(importlib.import_module(f"minillm.cli.{arguments.command}").run(arguments))


def _say(message: str, code: int = 1, kind: str = "error: ") -> int:
    """Write a line to stderr, if it can be written; returns ``code``."""
    with contextlib.suppress(OSError):
        print(f"minillm: {kind}{clean_line(message, 1000)}", file=sys.stderr)
    return code


def _not_imported(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0].replace("_", "-")
        return f"this needs the package {package}, which is not installed: `pip install {package}`"
    return f"a package cannot be loaded: {error}"


if __name__ == "__main__":
    sys.exit(main())
