"""The command line: output, exit codes, and one line for every mistake."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from minillm.bench import grammar_steps, host
from minillm.cli.main import main
from minillm.text.safe import clean

AS_USERS = (sys.executable, "-m", "minillm")


def process(*arguments: str, stdin: str = "", command: Sequence[str] = AS_USERS) -> subprocess.CompletedProcess[str]:
    """Run `minillm` as users start it. It imports torch first, which takes longer than most commands tested here."""
    result = subprocess.run(
        [*command, *arguments],
        input=stdin.encode(),
        capture_output=True,
        check=False,
        timeout=120,
    )
    return completed(arguments, result.returncode, result.stdout, result.stderr)


def minillm(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    """Run `minillm` in this process, where torch is imported already, with standard streams like those of `process`."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, errors, own_input = io.BytesIO(), io.BytesIO(), os.dup(0)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        os.dup2(file.fileno(), 0)  # prompts are read from the descriptor
        for name, stream in (("stdin", io.BytesIO(data)), ("stdout", out), ("stderr", errors)):
            patch.setattr(sys, name, io.TextIOWrapper(stream, "utf-8", write_through=True))
        try:
            code = main([*arguments])
        finally:
            os.dup2(own_input, 0)
            os.close(own_input)
        return completed(arguments, code, out.getvalue(), errors.getvalue())


def completed(arguments: Iterable[str], code: int, out: bytes, errors: bytes) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([*arguments], code, out.decode("utf-8"), errors.decode("utf-8"))


@pytest.fixture
def small(tiny_model: Path) -> list[str]:
    """Options of the small model."""
    return ["--model", str(tiny_model), "--device", "cpu", "--num-blocks", "64"]


@pytest.fixture
def generate(small: list[str]) -> Any:
    def run(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
        return minillm("generate", *arguments, *small, stdin=stdin)

    return run


def test_one_prompt_writes_its_text_and_nothing_else(generate: Any, small: list[str]) -> None:
    fixed = ["hello", "--temperature", "0", "--max-tokens", "8"]
    result = process("generate", *fixed, *small, "--quiet")
    again = generate(*fixed, "--json")
    [line] = again.stdout.splitlines()
    assert result.returncode == again.returncode == 0
    assert result.stderr == again.stderr == ""
    assert result.stdout == clean(json.loads(line)["outputs"][0]["text"]) + "\n"
    assert result.stdout == generate(*fixed).stdout, "a hint on stderr leaves it alone"


def test_prompts_from_a_file_standard_input_and_lines(
    generate: Any, small: list[str], minillm_command: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first line\nsecond line\n\nthird\n")
    fixed = ("--temperature", "0", "--max-tokens", "3", "--json")
    whole = [json.loads(line) for line in generate("-f", str(path), *fixed).stdout.splitlines()]
    assert [entry["prompt"] for entry in whole] == ["first line\nsecond line\n\nthird"]
    lines = [json.loads(line) for line in generate("-f", str(path), "--lines", *fixed).stdout.splitlines()]
    assert [entry["prompt"] for entry in lines] == ["first line", "second line", "third"]
    answered = process("generate", *fixed, *small, stdin="from a pipe\n", command=minillm_command)
    piped = [json.loads(line) for line in answered.stdout.splitlines()]
    assert [entry["prompt"] for entry in piped] == ["from a pipe"]
    several = generate("one", "two", "--max-tokens", "2", "--n", "2", "--seed", "1").stdout
    assert [line for line in several.splitlines() if line.startswith("---")] == [
        "--- 1.1 ---", "--- 1.2 ---", "--- 2.1 ---", "--- 2.2 ---",
    ]  # fmt: skip


def test_jsonl_requests_have_their_own_parameters_and_come_back_in_order(generate: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    requests = [
        {"prompt": "a", "max_tokens": 30, "id": "long"},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        {"prompt": [5, 6, 7], "max_tokens": 1, "logprobs": 2, "id": True},
        {"prompt": "x" * 5000, "id": {"row": 7}},
        {"prompt": "b", "max_tokens": 3, "n": 2},
    ]
    path.write_text("\n".join(map(json.dumps, requests)) + "\n\n")
    result = generate("-f", str(path), "--json", "--ignore-eos", "--seed", "3")
    outputs = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 1
    assert result.stderr == "minillm: 1 of 5 prompts failed\n"
    assert [entry["index"] for entry in outputs] == [0, 1, 2, 3, 4]
    assert [entry["request_id"] for entry in outputs] == [
        "long", "request-1", "true", '{"row": 7}', "request-4",
    ]  # fmt: skip
    assert [len(entry["outputs"][0]["token_ids"]) if entry["outputs"] else None for entry in outputs] == [
        30,
        2,
        1,
        None,
        3,
    ]
    assert len(outputs[4]["outputs"]) == 2
    assert "context holds" in outputs[3]["error"]
    [logprob] = outputs[2]["outputs"][0]["logprobs"]
    assert len(logprob["top"]) == 2
    assert outputs[2]["prompt_token_ids"] == [5, 6, 7]
    assert outputs[0]["metrics"]["time"] > 0


ODD = "a\u2028b\x85c\x1ed \x9b31m \u202e"


def test_odd_characters_of_requests_come_back_as_they_were(
    generate: Any, small: list[str], minillm_command: tuple[str, ...], tmp_path: Path
) -> None:
    """A line end within a text and a lone surrogate do not end the run. Terminal controls are not printed."""
    requests = [{"prompt": ODD, "max_tokens": 1}, {"prompt": "\ud83d!", "max_tokens": 1, "id": "\udfff"}]
    path, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps(requests[0], ensure_ascii=False), json.dumps(requests[1])]
    path.write_bytes("\r\n".join(lines).encode())
    options = ("-f", str(path), "--json", "--temperature", "0")
    shown = process("generate", *options, *small, command=minillm_command)
    kept = generate("-f", str(path), "--output", str(output), "--temperature", "0")
    assert shown.returncode == kept.returncode == 0, shown.stderr + kept.stderr
    for text in (shown.stdout, output.read_text()):
        answers = [json.loads(line) for line in text.splitlines()]
        assert [answer["prompt"] for answer in answers] == [ODD, "\ud83d!"]
        assert answers[1]["request_id"] == "\udfff"
        assert not set(text) & set("\x9b\u202e\u2028\x85")
    path.write_text(f"{ODD}\n")
    [answer] = generate("-f", str(path), "--lines", "--json", "--max-tokens", "1").stdout.splitlines()
    assert json.loads(answer)["prompt"] == ODD


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\nnonsense\n', ":2: not JSON"),
        ('{"prompt": "a"}\n[1]\n', ":2: a request is an object"),
        ("{}\n", ':1: give either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}\n', ":1: give either"),
        ('{"promt": "a"}\n', ":1: unknown key 'promt'; did you mean prompt?"),
        ('{"message": [], "max_tokens": 3}\n', ":1: unknown key 'message'; did you mean messages?"),
        ('{"prompt": ""}\n', ":1: the prompt is empty"),
        ('{"prompt": 3}\n', ':1: "prompt" is text or a list'),
        ('{"messages": [{"role": "user"}]}\n', ":1: a message without content"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', ":1: a part of type 'image'"),
        ('{"messages": "hi"}\n', ":1: a conversation is a list"),
        ('{"prompt": "a", "temprature": 1}\n', ":1: unknown parameter 'temprature'"),
        ('{"prompt": "a", "top_p": 3}\n', ":1: top_p must be"),
        ('{"prompt": "a", "seed": 1, "beam_width": 2}\n', ":1: seed is for sampling, but this is a beam search"),
        ('{"prompt": ' + "[" * 100_000, ":1: not JSON: it is nested too deeply"),
        ("\n\n", "holds no prompt"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    result = minillm("generate", "-f", str(path), "--model", "no-such-model")
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


MISTAKES = [
    (["genrate"], "did you mean generate"),
    *(([word], f"unknown COMMAND {word!r}; known: ") for word in ("create", "stop", "ps", "rmi", "rmm")),
    (["lst"], "unknown COMMAND 'lst', did you mean list?"),
    (["generate", "--temprature", "1", "x"], "did you mean --temperature?; see minillm generate --help"),
    (["bench", "latency", "--batchsize"], "did you mean --batch-size?; see minillm bench latency --help"),
    (["--versoin"], "did you mean --version?; see minillm --help"),
    (["generate", "x", "--temperature", "nan"], "temperature must be"),
    (["generate", "x", "--temperature", "-1"], "temperature must be"),
    (["generate", "x", "--top-p", "0"], "top_p must be"),
    (["generate", "x", "--n", "1000000"], "n must be from 1 to 256"),
    (["generate", "x", "--n", "two"], "--n"),
    (["generate", "x", "--max-tokens", "0"], "max_tokens must be"),
    (["generate", "x", "--block-size", "17"], "block_size must be one of"),
    (["generate", "x", "--dtype", "int3"], "dtype must be"),
    (["generate", "x", "--device", "tpu"], "device must be"),
    (["generate", "x", "--device", "cuda"], "use --device cpu"),
    (["generate", "x", "--model", "smolm2-135m"], "did you mean smollm2-135m"),
    (["generate", "x", "--model", "no/such/dir"], "no file or directory"),
    (["generate", "x", "-f", "y"], "not both"),
    (["generate", "-f", "/no/such/file"], "cannot read /no/such/file"),
    (["generate", "-f", ""], "--file is empty"),
    (["generate", "-f", "x", "--lines", "--jsonl"], "not allowed with"),
    (["generate", ""], "prompt 1 is empty"),
    *(([command], 'give one in quotation marks, such as "Once upon a time"') for command in ("generate", "run")),
    (["generate", "x", "--chat", "--parse-special"], "for raw prompts"),
    (["generate", "x", "--config", "/no/config.toml"], "there is no /no/config.toml"),
    (["chat", "what", "is", "this"], "one argument too many: 'is'; put quotation marks"),
    (["bench", "latency", ""], "one argument too many: ''"),
    (["chat", "--theme", "blue"], "unknown --theme 'blue'; known: dark, light"),
    (["chat", "--server", "http://localhost:1", "--plain"], "--server needs the app"),
    (["chat", "--server", "", "--model", "/no/such"], "--server needs the app"),
    (["rm"], "MODEL"),
    (["show", "smolm2-135m"], "did you mean smollm2-135m"),
    (["show", "/no/such"], "no file or directory"),
    (["completions", "tcsh"], "unknown shell 'tcsh'"),
    (["pull", "nothing"], "unknown model 'nothing'"),
    (["bench", "latency", "--shape", "gpt-5"], "unknown shape"),
    (["bench", "speed"], "unknown"),
    (["bench"], "WORKLOAD"),
    (["bench", "latency", "--batch-size", "0"], "batch_size must be from 1"),
    (["bench", "latency", "--shape", "llama-8b", "--model", "x"], "not both"),
    (["bench", "start", "--shape", "llama-8b", "--model", "x", "--runs", "1"], "not both"),
]


def test_what_is_not_downloaded_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use temporary directories, because the user may have downloaded that model."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"MINILLM_{name}", str(tmp_path / name))
    result = minillm("rm", "smollm2-1.7b")
    assert "is not downloaded" in result.stderr
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_every_mistake_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("here is a GPU")
    result = minillm(*arguments)
    assert said in result.stderr
    assert result.stderr.startswith("minillm: error: ")
    assert result.stderr.count("\n") == 1
    assert result.returncode == 2
    assert result.stdout == ""


def test_a_server_is_not_replaced_by_a_model_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.ui.terminal.is_plain_only", lambda: True)
    result = minillm("chat", "--server", "http://localhost:1", "--model", "no-such-model")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--server needs the app, and the app a terminal" in result.stderr


def test_a_mistake_ends_the_process_with_its_exit_code() -> None:
    result = process("generate", "x", "--top-p", "0")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_damaged_models_fail_with_exit_code_1(tiny_model: Path, tmp_path: Path) -> None:
    for name, content, said in (
        ("model.safetensors", b"<html>", "web page"),
        ("model.safetensors", b"", "empty"),
        ("config.json", b"{", "config.json"),
        ("tokenizer.json", b"{", "tokenizer.json"),
    ):
        broken = tmp_path / f"{name}{len(content)}"
        shutil.copytree(tiny_model, broken)
        (broken / name).write_bytes(content)
        result = minillm("generate", "x", "--model", str(broken), "--device", "cpu")
        assert result.returncode == 1
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"GGUF\x03")
    result = minillm("generate", "x", "--model", str(broken))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_an_error_for_help_too(unbuffered: str) -> None:
    for argument in ("--version", "--help"):
        with open("/dev/full", "w") as full:
            result = subprocess.run(
                [sys.executable, "-m", "minillm", argument], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, check=False,
            )  # fmt: skip
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
        assert "No space left" in result.stderr


def test_hostile_names_are_shown_and_not_obeyed() -> None:
    for arguments in (["generate", "x", "--model", "\x1b]0;evil\x07"], ["\x1b[2J"], ["generate", "-f", "\x1b[6n"]):
        result = minillm(*arguments)
        assert "\x1b" not in result.stderr + result.stdout
        assert result.returncode == 2


def test_what_a_model_says_cannot_drive_the_terminal(tiny_model: Path, tmp_path: Path) -> None:
    """A model is made to say ESC and nothing else."""
    backend = tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    escape = backend.encode("\x1b", add_special_tokens=False).ids[-1]
    request = {"prompt": "x", "logit_bias": {escape: 100}, "max_tokens": 4, "temperature": 0}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(request))
    result = minillm("generate", "-f", str(path), "--model", str(tiny_model), "--device", "cpu")
    assert result.stdout == "␛␛␛␛\n"
    result = minillm("generate", "-f", str(path), "--json", "--model", str(tiny_model), "--device", "cpu")
    assert "\x1b" not in result.stdout
    assert json.loads(result.stdout)["outputs"][0]["text"] == "\x1b" * 4


def test_input_of_any_bytes(generate: Any) -> None:
    for data in (b"\xff\xfe\x00", "\ufeffbom".encode(), b"\x00", "\u202ebidi".encode()):
        result = generate("--max-tokens", "1", stdin=data)
        assert result.returncode == 0, result.stderr


def test_models_and_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    listed = minillm("models").stdout
    assert "smollm2-135m (default)" in listed
    entries = [json.loads(line) for line in minillm("models", "--json").stdout.splitlines()]
    assert all(entry["path"] is None for entry in entries)
    assert {entry["name"] for entry in entries if entry["gated"]} == {"llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"}
    facts = json.loads(minillm("info", "--json").stdout)
    assert facts["directories"]["cache"] == str(tmp_path)
    assert facts["versions"]["torch"]
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path / "none.toml"))
    assert minillm("models").returncode == 2


def test_a_reader_that_goes_away_is_no_error(tiny_model: Path) -> None:
    command = (
        f"{sys.executable} -m minillm generate a b c d --model {tiny_model} --device cpu --max-tokens 50 | head -c 1"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in result.stderr


def test_ctrl_c_keeps_finished_results(minillm_command: tuple[str, ...], tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    requests = [{"prompt": "a", "max_tokens": 2, "ignore_eos": True}]
    requests += [{"prompt": "b", "max_tokens": 480, "ignore_eos": True}] * 60
    path.write_text("\n".join(map(json.dumps, requests)))
    command = [*minillm_command, "generate", "-f", str(path), "--json", "--model", str(tiny_model), "--device", "cpu"]
    command += ["--max-num-seqs", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(json.loads(first)["outputs"][0]["token_ids"]) == 2
    finished = 1 + len(out.splitlines())
    assert f"stopped; {finished} of 61 prompts are finished" in err
    assert "Traceback" not in err


def test_ctrl_c_while_loading_is_quiet(of_long_answers: Path) -> None:
    """The signals come once Python itself has started; before that, Python prints its own message."""
    begun = "print('begun', flush=True); from minillm.cli.main import main; raise SystemExit(main())"
    options = ("--device", "cpu", "--num-blocks", "1024", "--max-tokens", "16000", "--ignore-eos")  # it has not ended
    for delay in (0.05, 0.4, 0.8, 1.3):
        command = [sys.executable, "-c", begun, "generate", "x", "--model", str(of_long_answers), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (130, -signal.SIGINT), err
        if process.returncode == 130:
            assert "Traceback" not in err


def test_ctrl_c_in_the_first_imports_ends_with_one_line(tmp_path: Path) -> None:
    """Ctrl-c comes within an exec(), because Python would remember it until the end of the process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'minillm.cli.main': exec('raise KeyboardInterrupt')\n"
        "sys.meta_path.insert(0, Finder())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "minillm", "info"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)
    assert (result.returncode, result.stderr) == (130, "minillm: stopped\n")


def in_place_of_info(code: str) -> subprocess.CompletedProcess[str]:
    """Have `minillm info` call ``run(arguments)`` of this code."""
    program = f"{code}\nfrom minillm.cli import info, main\ninfo.run = run\nraise SystemExit(main.main(['info']))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)


def test_ctrl_c_that_comes_during_a_destructor_is_not_lost() -> None:
    """Python ignores what a destructor raises; while modules are imported, that is a part of the time."""
    done = in_place_of_info("""
import signal, time

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def run(arguments):
    Dropped()
    print("goes on", flush=True)
    time.sleep(60)
""")
    assert done.stderr == "minillm: stopped\n"
    assert done.returncode == 130


def test_ctrl_c_that_comes_while_an_import_fails_is_no_error() -> None:
    """Python makes a TypeError of it, where the module that imports expects an ImportError."""
    done = in_place_of_info("""
import os, signal, threading

def run(arguments):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        try:
            from os import nothing
        except ImportError:
            pass
""")
    assert done.stderr == "minillm: stopped\n"
    assert done.returncode == 130


def test_ctrl_c_that_comes_while_a_class_is_made_is_no_error() -> None:
    """Python 3.11 makes a RuntimeError of it, where a class tells its attributes their names."""
    done = in_place_of_info("""
class Name:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt

def run(arguments):
    class Named:
        attribute = Name()
""")
    assert (done.returncode, done.stderr) == (130, "minillm: stopped\n")


def run_on_terminal(command: tuple[str, ...], *arguments: str) -> tuple[int, str]:
    """Run with stdin, stdout and stderr on a terminal. Returns the exit code and the output."""
    pid, master = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        os.execv(command[0], [*command, *arguments])
    output = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    _, status = os.waitpid(pid, 0)
    os.close(master)
    return os.waitstatus_to_exitcode(status), output.decode(errors="replace")


def test_the_tour_asks_for_a_terminal_in_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "__stdin__", None)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "minillm: error: minillm demo needs a terminal, but standard input is not one; "
        "run it in a terminal, or use `minillm chat --plain`\n"
    )


def test_a_terminal_gets_progress_and_a_pipe_does_not(
    minillm_command: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a\nb\nc\n")
    options = [
        "generate",
        "-f",
        str(path),
        "--lines",
        "--model",
        str(tiny_model),
        "--device",
        "cpu",
        "--max-tokens",
        "200",
        "--ignore-eos",
    ]
    code, shown = run_on_terminal(minillm_command, *options)
    assert code == 0
    assert "loading weights" in shown
    assert "tok/s" in shown
    assert "/3 [" in shown
    code, quiet = run_on_terminal(minillm_command, *options, "--quiet")
    assert "tok/s" not in quiet
    code, asked = run_on_terminal(minillm_command, "generate")
    assert code == 2
    assert "no prompt" in asked


def test_beams_come_best_first_with_their_scores(tiny_model: Path) -> None:
    options = ["--beam-width", "3", "--length-penalty", "0", "--early-stopping", "never", "--max-tokens", "4"]
    result = minillm("generate", "hello", "--model", str(tiny_model), "--json", *options)
    assert result.returncode == 0, result.stderr
    scores = [output["score"] for output in json.loads(result.stdout)["outputs"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    wrong = minillm("generate", "hello", "--beam-width", "3", "--temperature", "1")
    assert wrong.returncode == 2
    assert "temperature" in wrong.stderr


def test_bench_host_prints_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host, grammar_steps):
        monkeypatch.setattr(module, "_STEPS", 2)
    monkeypatch.setattr(grammar_steps, "_WARM_UP", 4)
    measure = grammar_steps.grammar_steps

    def of_few(num_seqs: int, vocab: int, tokenizer: Any) -> dict[str, float]:
        """Measure few sequences and tokens: of many, all rarely decode, and lexers of 128,256 tokens take long."""
        return measure(min(num_seqs, 8), vocab if tokenizer else 4096, tokenizer)

    monkeypatch.setattr(host, "grammar_steps", of_few)
    result = minillm("bench", "host", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert len(figures) == 5 + 6 * 8  # steps by a schema, each with its seven parts
    assert all(figure["microseconds"] > 0 for figure in figures)
