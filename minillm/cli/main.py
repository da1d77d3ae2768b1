"""The ``minillm`` command.

The subcommands live in the other files here; this one only knows their options, so that ``--help`` imports no torch.
Exit codes: 0 done, 1 failed, 2 asked for wrongly, 130 stopped with ctrl-c.
"""

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import minillm
from minillm.cli.options import MODEL_NAMES, Parser, add_model_option, add_model_options, add_sampling_options, option
from minillm.errors import MinillmError, UsageError, memory_errors
from minillm.system import no_interrupt_lost
from minillm.text.safe import clean_line
from minillm.user_config import THEMES


def command_parser() -> Parser:
    """The parser of the whole command."""
    about = "Llama models on your own machine: chat, batch generation, and a view of the KV cache."
    parser = Parser(prog="minillm", description=about, allow_abbrev=False)
    parser.add_argument(
        "--version", action="version", version=f"minillm {minillm.__version__}", help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, _, *options) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.fill = options
    return parser


def _add_form(generate: Parser) -> None:
    form = generate.add_mutually_exclusive_group()
    add = partial(form.add_argument, dest="form", action="store_const")
    add("--lines", const="lines", help="every line of the file is a prompt (else the whole text is)")
    add("--jsonl", const="jsonl", help="every line is a JSON request (implied by the name *.jsonl)")


def _add_workloads(bench: Parser) -> None:
    from minillm.cli.bench import add_workloads

    add_workloads(bench)


def _add_grammars(generate: Parser) -> None:
    from minillm.cli.grammars import add_grammar_options

    add_grammar_options(generate)


_switch = partial(option, action="store_true")
_file = partial(option, metavar="FILE")

_CONFIG = _file("--config", help="settings (default: config.toml in the user's directory)")
_JSON = _switch("--json", help="write JSON")
_NAME = option("model", nargs="?", metavar="NAME", help=f"{MODEL_NAMES} (default: the default model)")
_THEME = option(
    "--theme", choices=THEMES, metavar="NAME", help="colours: dark, light, nord … (default: by the terminal)"
)

# Of each command: its summary, the function here that runs it, and the functions that add its options.
_COMMANDS: dict[str, tuple[Any, ...]] = {
    "chat": (
        "talk to a model in the terminal, and watch its block tables",
        "chat.chat",
        option("question", nargs="?", metavar="QUESTION", help="ask this first, about text that is piped in"),
        add_model_options,
        option("-s", "--system", metavar="TEXT", help="system prompt"),
        _switch("--plain", help="line by line: for pipes and screen readers"),
        option("--server", metavar="URL", help="use the engine of `minillm serve`; MINILLM_API_KEY is its key"),
        _switch("--resume", help="go on with the latest saved conversation"),
        *(_THEME, _CONFIG, add_sampling_options),
    ),
    "demo": (
        "a guided tour of the cache on the real engine, in the terminal",
        "chat.demo",
        option("--speed", type=float, default=1.0, metavar="X", help="above 1: faster (1)"),
        *(add_model_option, _CONFIG, _THEME),
    ),
    "generate": (
        "complete prompts: arguments, a file, or standard input",
        "generate.run",
        option(
            "prompts",
            nargs="*",
            metavar="PROMPT",
            help="text to complete; what a pipe or a file brings on standard input is put after it, "
            "behind a blank line",
        ),
        _file("-f", "--file", help="read prompts from FILE ('-': standard input)"),
        _add_form,
        _switch("--chat", help="wrap each prompt as a user's message of a chat"),
        option("-s", "--system", metavar="TEXT", help="system prompt; implies --chat"),
        _switch(
            "--parse-special",
            help="control tokens that a raw prompt spells (<|im_end|>) are control tokens: for text that you trust",
        ),
        _switch("--json", help="write one JSON object per prompt"),
        _file("-o", "--output", help="write JSON objects to FILE; a run that was stopped goes on from there"),
        _switch("--force", help="overwrite an --output that is finished"),
        _switch("--data-parallel", help="share the prompts among the replicas that torchrun has started"),
        _switch("-q", "--quiet", help="no progress bar"),
        *(_CONFIG, add_model_options, add_sampling_options, _add_grammars),
    ),
    "serve": (
        "answer OpenAI's protocol over HTTP: chats, completions, forks, pinned prefixes, the cache",
        "serve.run",
        option("name", nargs="?", metavar="MODEL", help=f"{MODEL_NAMES} (default: the default model)"),
        option("--host", default="127.0.0.1", metavar="HOST", help="address (127.0.0.1); others need a key"),
        option("--port", type=int, default=8000, metavar="N", help="port (8000); 0: any that is free"),
        _file("--api-key-file", help="keys that clients need, one a line, perhaps with a name before: `anna: KEY`"),
        option("--api-key", metavar="KEY", help="one key; better in the environment, as MINILLM_API_KEY"),
        option("--served-model-name", action="append", metavar="NAME", help="the model's name for clients"),
        option("--allowed-host", action="append", metavar="HOST", help="another name that this server goes by"),
        option("--allow-origin", action="append", metavar="URL", help="a web page that may use it (CORS)"),
        option("--replicas", type=int, metavar="N", help="engines of the model, each with its GPU (1, or torchrun's)"),
        option("--max-waiting", type=int, default=1024, metavar="N", help="requests that may wait (1024)"),
        option("--max-body", type=int, default=8 << 20, metavar="BYTES", help="of one request (8388608)"),
        option("--grace", type=int, default=30, metavar="SECONDS", help="for answers under way when it ends (30)"),
        *(_CONFIG, add_model_options),
    ),
    "models": (
        "list the models that have a name: which are downloaded, and which fit this machine",
        "models.models",
        _switch("--json", help="write one JSON object per model"),
    ),
    "fit": (
        "which models fit this machine, in which form, with how much context, and how fast",
        "fit.run",
        option("model", nargs="?", metavar="NAME", help=f"{MODEL_NAMES} (default: all of weights.toml)"),
        option(
            "--memory",
            metavar="SIZE",
            help="a device with so much memory, like 12GiB: a GPU, or with --device cpu a CPU",
        ),
        option("--bandwidth", metavar="RATE", help="of its memory, like 500GB/s (default: measured, where it is here)"),
        option("--context", metavar="N", type=int, help="tokens of context that must fit"),
        option("--kv-cache-dtype", choices=("auto", "int8"), help="int8: K and V of the context in 8 bits"),
        option("--speculate", metavar="MODEL", help="beside a draft model, which takes its own room"),
        option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU where there is one)"),
        *(_CONFIG, _JSON),
    ),
    "show": ("what there is to know about a model, without loading it", "models.show", _NAME, _CONFIG, _JSON),
    "pull": (
        "download a model",
        "models.pull",
        *(_NAME, _CONFIG),
        _switch("--verify", help="check the files' sha256 even if they are there already"),
    ),
    "rm": (
        "delete downloaded models",
        "models.rm",
        option("downloaded", nargs="+", metavar="NAME", help="downloaded models"),
    ),
    "info": ("versions, devices and directories: the first thing to put into a bug report", "info.run", _JSON),
    "bench": ("measure speed: as its flags say, without config.toml", "bench.run", _add_workloads),
    "completions": (
        "a script that completes this command's words in bash, zsh or fish",
        "completions.run",
        option("shell", choices=("bash", "zsh", "fish"), help="print what this shell's startup file sources"),
        option("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS),  # print candidates for the last one
    ),
}


_WHILE_WRITING = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EBADF, errno.EIO)  # files are named by their errors


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code; prints errors that a user can cause as one line."""
    settle_streams()
    code = _guarded(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the rest is dropped: Python would try again at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def settle_streams() -> None:
    """Open the standard streams that are closed, and let no character fail.

    Otherwise the next file that is opened gets a closed stream's number, and with it the output of libraries. Closed
    input is empty here, output to a closed stderr is lost, and writing to a closed stdout fails.
    """
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free: the stream's own
            os.set_inheritable(number, True)
            stream = open(number, mode, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="backslashreplace")


def _guarded(argv: Sequence[str]) -> int:
    """Run, and make one line of each error."""
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


@no_interrupt_lost()
@memory_errors()
def _run(argv: Sequence[str]) -> int:
    try:
        arguments = command_parser().parse_args(argv)
    except SystemExit:  # --help, --version
        return 0
    if arguments.command is None:
        command_parser().print_help()
        return 2
    try:
        os.getcwd()
    except OSError:  # libraries that torch loads end the process
        raise UsageError("the current directory does not exist any more; change to another one") from None
    file, function = _COMMANDS[arguments.command][1].split(".")
    return int(getattr(importlib.import_module(f"minillm.cli.{file}"), function)(arguments))


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
