"""Run the ``minillm`` command.

The other modules of this package implement the commands. This one knows only their options, so that ``--help`` does not
import torch.

Exit codes: 0 success, 1 failure, 2 usage error, 130 stopped with ctrl-c.
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
from minillm.system import keep_interrupts
from minillm.text.safe import clean_line
from minillm.user_config import CALM_SAMPLING, CHAT_SAMPLING, THEMES


def command_parser() -> Parser:
    """Return the parser of the whole command line."""
    about = "run Llama-family models on your own machine: chat, batch generation, a server, and a view of the KV cache"
    parser = Parser(prog="minillm", description=about)
    version = f"minillm {minillm.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, _, *options) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, aliases=_ALIASES.get(name, ()))
        command.fill = options
        command.essential = _ESSENTIAL.get(name, "").split()
    return parser


def _add_line_format(generate: Parser) -> None:
    group = generate.add_mutually_exclusive_group()
    add = partial(group.add_argument, dest="form", action="store_const")
    add("--lines", const="lines", help="treat every line of the file as a prompt (default: the whole file is one)")
    add("--jsonl", const="jsonl", help="treat every line of the file as a JSON request (default for *.jsonl)")


def _add_workloads(bench: Parser) -> None:
    from minillm.cli.bench import add_workloads

    add_workloads(bench)


def _add_grammars(generate: Parser) -> None:
    from minillm.cli.grammars import add_grammar_options

    add_grammar_options(generate)


_switch = partial(option, action="store_true")
_file = partial(option, metavar="FILE")

_CONFIG = _file("--config", help="read settings from FILE (default: config.toml in the configuration directory)")
_JSON = _switch("--json", help="print JSON")
_QUIET = _switch("-q", "--quiet", help="show no progress bar and no hints")
_NAME = option("model", nargs="?", metavar="MODEL", help=f"{MODEL_NAMES} (default: the default model)")
_SYSTEM = option("-s", "--system", metavar="TEXT", help="system prompt")
_THEME = option(
    "--theme", choices=THEMES, metavar="NAME", help="color theme: dark, light, nord, … (default: match the terminal)"
)

# For each command: its summary, "MODULE.FUNCTION" of this package that runs it, and functions that add its options.
_COMMANDS: dict[str, tuple[Any, ...]] = {
    "chat": (
        "chat with a model in the terminal, and watch the KV cache",
        "chat.chat",
        option("question", nargs="?", metavar="QUESTION", help="ask this first; piped text is appended to it"),
        partial(add_model_options, defaults={"speculate": "lookup on a CPU, otherwise off"}),
        _SYSTEM,
        _switch("--plain", help="chat line by line, for pipes and screen readers"),
        option("--server", metavar="URL", help="chat with a running `minillm serve`; its key is MINILLM_API_KEY"),
        _switch("--resume", help="continue the latest saved conversation"),
        _switch("--no-save", help="private chat: save neither conversations nor blocks on disk"),
        *(_THEME, _CONFIG, partial(add_sampling_options, defaults=CHAT_SAMPLING)),
    ),
    "run": (
        "answer one question on standard output; without a question, open the chat",
        "run.run",
        option("name", nargs="?", metavar="MODEL", help=f"{MODEL_NAMES} (default: the default model)"),
        option("question", nargs="*", metavar="QUESTION", help="quoted question; piped text is appended to it"),
        partial(add_model_options, defaults={"speculate": "lookup on a CPU, otherwise off"}),
        *(_SYSTEM, _switch("--json", help="print the answer as a JSON object"), _QUIET, _CONFIG),
        partial(add_sampling_options, defaults=CHAT_SAMPLING),
        _add_grammars,
    ),
    "generate": (
        "complete prompts from arguments, a file or standard input",
        "generate.run",
        option(
            "prompts",
            nargs="*",
            metavar="PROMPT",
            help="text to complete; piped text is appended to it after a blank line",
        ),
        _file("-f", "--file", help="read prompts from FILE ('-': standard input)"),
        _add_line_format,
        _switch("--chat", help="apply the model's chat template: each prompt is a user message"),
        option("-s", "--system", metavar="TEXT", help="system prompt; implies --chat"),
        _switch(
            "--parse-special",
            help="encode control tokens spelled in a prompt (<|im_end|>) as control tokens; for trusted text only",
        ),
        _switch("--json", help="print one JSON object per prompt"),
        _file("-o", "--output", help="write JSON objects to FILE; repeat the command to resume an interrupted run"),
        _switch("--force", help="overwrite a finished --output file"),
        option(
            "--replicas", type=int, metavar="N", help="start N engines, each with its own GPUs or part of the cores"
        ),
        option("--ray", metavar="ADDRESS", help="run the engines on Ray: local, auto, HOST:PORT or ray://HOST:PORT"),
        option("--engines", type=int, metavar="N", help="number of engines on Ray (default: 1)"),
        option("--shard", metavar="I/N", help="complete part I (0 to N-1) of N parts, to an output file of its own"),
        *(_QUIET, _CONFIG, add_model_options, partial(add_sampling_options, defaults=CALM_SAMPLING), _add_grammars),
    ),
    "serve": (
        "serve a model over HTTP with an OpenAI-compatible API",
        "serve.run",
        option("name", nargs="?", metavar="MODEL", help=f"{MODEL_NAMES} (default: the default model)"),
        option(
            "--host",
            default="127.0.0.1",
            metavar="HOST",
            help="address to bind (default: 127.0.0.1); any address that other machines can reach needs an API key",
        ),
        option("--port", type=int, default=8000, metavar="N", help="port (default: 8000); 0 picks a free one"),
        _file("--api-key-file", help="API keys, one per line, optionally with the owner's name: `anna: KEY`"),
        option("--api-key", metavar="KEY", help="one API key; MINILLM_API_KEY keeps it out of the list of processes"),
        option("--served-model-name", action="append", metavar="NAME", help="model name that clients use; repeatable"),
        option("--allowed-host", action="append", metavar="HOST", help="accept this host name as well; repeatable"),
        option(
            "--allow-origin",
            action="append",
            metavar="URL",
            help="let web pages of this origin use the server (CORS); repeatable",
        ),
        option(
            "--replicas", type=int, metavar="N", help="engines, each on its own GPUs (default: 1, or those of torchrun)"
        ),
        option("--max-waiting", type=int, default=1024, metavar="N", help="requests that may wait (default: 1024)"),
        option(
            "--max-body", type=int, default=8 << 20, metavar="BYTES", help="largest request body (default: 8388608)"
        ),
        option(
            "--grace",
            type=int,
            default=30,
            metavar="SECONDS",
            help="time to finish running answers at shutdown (default: 30)",
        ),
        _switch("--wait-warm", help="be ready only when all kernels are compiled and all CUDA graphs recorded"),
        *(_CONFIG, add_model_options),
    ),
    "models": (
        "list the named models, and show which are downloaded and which fit this machine",
        "models.models",
        _switch("--json", help="print one JSON object per model"),
    ),
    "pull": (
        "download a model",
        "models.pull",
        *(_NAME, _CONFIG),
        _switch("--verify", help="check the sha256 of files that are already downloaded"),
    ),
    "show": ("show the facts of a model without loading it", "models.show", _NAME, _CONFIG, _JSON),
    "rm": (
        "delete downloaded models",
        "models.rm",
        option("downloaded", nargs="+", metavar="MODEL", help="downloaded models"),
    ),
    "fit": (
        "show which models and quantizations fit a machine, with how much context, and how fast they run",
        "fit.run",
        option("model", nargs="?", metavar="MODEL", help=f"{MODEL_NAMES} (default: all that `minillm models` lists)"),
        option("--memory", metavar="SIZE", help="memory of another GPU, like 12GiB; with --device cpu, of another CPU"),
        option("--bandwidth", metavar="RATE", help="memory bandwidth, like 500GB/s (default: measured here)"),
        option("--context", metavar="N", type=int, help="tokens of context that must fit"),
        option("--kv-cache-dtype", choices=("auto", "int8"), help="int8: store the KV cache in 8 bits"),
        option("--speculate", metavar="MODEL", help="reserve memory for this draft model"),
        option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one)"),
        *(_CONFIG, _JSON),
    ),
    "cache": (
        "list, verify, trim or clear the blocks of the KV cache on disk",
        "cache.run",
        option(
            "action",
            nargs="?",
            default="list",
            choices=("list", "verify", "trim", "clear"),
            metavar="ACTION",
            help="list: show the models with blocks on disk; verify: read all blocks, remove damaged ones; trim SIZE: "
            "remove the least recently used ones; clear: remove all (default: list)",
        ),
        option("size", nargs="?", metavar="SIZE", help="of all blocks that stay, such as 5GB"),
        _JSON,
    ),
    "demo": (
        "take a guided tour of the KV cache on the real engine",
        "chat.demo",
        option("--speed", type=float, default=1.0, metavar="X", help="speed of the tour (default: 1)"),
        *(add_model_option, _CONFIG, _THEME),
    ),
    "bench": ("run benchmarks (ignores config.toml)", "bench.run", _add_workloads),
    "info": ("print versions, devices and directories, for bug reports", "info.run", _JSON),
    "completions": (
        "print a script that completes minillm's options in a shell",
        "completions.run",
        option("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish"),
        # Hidden: the script passes the words typed so far, and the command prints completions of the last one.
        option("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS),
    ),
}

_ALIASES: dict[str, tuple[str, ...]] = {"models": ("list", "ls")}

# The options that --help shows, most important first; --help-all shows all.
_SAMPLING = "--temperature --top-p --max-tokens --n --beam-width --seed"
_ENGINE = "--device --weights --kv-cache-dtype --max-model-len --speculate"
_ESSENTIAL = {
    "chat": f"--model --system --resume --no-save --plain --server --theme {_SAMPLING} {_ENGINE} --config",
    "run": f"--model --system --json {_SAMPLING} --json-schema --choice {_ENGINE} --quiet --config",
    "generate": f"--model --chat --system --file --lines --jsonl --output --json {_SAMPLING} --json-schema --choice "
    "--device --weights --quiet --config",
    "serve": f"--host --port --api-key-file --served-model-name --replicas {_ENGINE} --max-num-seqs "
    "--gpu-memory-utilization --tensor-parallel-size --config",
}


# Errors while writing to standard output. An OSError with one of these codes and no file name is reported as such.
_WHILE_WRITING = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EBADF, errno.EIO)


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit code. Each error is printed as one line."""
    settle_streams()
    code = _guarded(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # drop the rest: at exit, Python would try again and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def settle_streams() -> None:
    """Open closed standard streams, and make output escape the characters that its encoding lacks.

    If a stream stayed closed, the next opened file would get its file descriptor, and libraries' output would go to
    that file. After this call, closed input reads as empty, output to a closed stderr is lost, and writing to a closed
    stdout fails.
    """
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the system assigns the lowest free descriptor: the closed stream's
            os.set_inheritable(number, True)
            stream = open(number, mode, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="backslashreplace")


def _guarded(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. Print each error as one line."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except MinillmError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("stopped", 130, "")
    except BrokenPipeError:  # nobody reads our output any more
        return 1
    except OSError as error:  # a full disk, no permission, too many open files
        where = error.filename or ("cannot write to standard output" if error.errno in _WHILE_WRITING else "")
        return _say(f"{where}: {error.strerror or error}".removeprefix(": "))
    except Exception as error:
        if os.environ.get("MINILLM_DEBUG"):
            raise
        if isinstance(error, ImportError) and not str(error.name).startswith("minillm"):
            return _say(_not_imported(error))
        what = f"{type(error).__name__}: {clean_line(str(error), 500)}"
        return _say(f"{what} (set MINILLM_DEBUG=1 for the traceback)", kind="internal error: ")


@keep_interrupts()
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
    except OSError:  # checked here because libraries that torch loads would end the process
        raise UsageError("the current directory does not exist any more; change to another one") from None
    name = next((name for name, aliases in _ALIASES.items() if arguments.command in aliases), arguments.command)
    file, function = _COMMANDS[name][1].split(".")
    return int(getattr(importlib.import_module(f"minillm.cli.{file}"), function)(arguments))


def _say(message: str, code: int = 1, kind: str = "error: ") -> int:
    """Print a line to stderr, if that is possible. Return ``code``."""
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
