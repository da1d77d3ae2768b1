"""`minillm chat` as a process on a terminal: its output, and the state in which it leaves the terminal."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

import minillm.ui.textual_internals  # noqa: F401  it sets the widths of characters
from lib.programs.fake_engine import HOSTILE
from lib.terminal import CHAT, PROGRAMS, Session, session
from minillm.ui.chat.sessions import SessionStore

# The app itself may send only these: cursor, color and mode sequences of a fixed form.
_OWN = re.compile(
    rb"\x1b\[[0-9;]*[HfmABCDJKX]|\x1b\[\?[0-9;]+[hl]|\x1b\[\?[0-9;]*\$p|\x1b\[[<>=]?[0-9;]*u|\x1b\[>[0-9;]*q|"
    rb"\x1b\]22;[a-z-]*\x07|\x1b\[\?u|\x1bP[\x20-\x7e]*\x1b\\|\x1b\[c|\x1b\[[0-9;]* ?[qt]|\x1b7|\x1b8"
)


def start(running: Session) -> None:
    running.wait_for("ready in")


def engines(log: Path) -> set[int]:
    return {int(line.split()[0]) for line in log.read_text().splitlines()}


def gone(process: int) -> bool:
    """Return whether the process has ended, or is a zombie of another parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] in "ZX"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_hostile_text_is_shown_and_never_obeyed() -> None:
    with session(size=(200, 60)) as running:
        start(running)
        running.type("hostile\r")
        running.wait_for("50.0 tok/s")
        running.wait_for("<b>html</b>")
        running.read(0.5)
        shown = _OWN.sub(b"", running.output)
        assert b"\x1b" not in shown, shown[shown.index(b"\x1b") :][:80]
        text = running.output.decode("utf-8", "replace")
        rest = shown.replace(b"\r\n", b"").decode()  # the terminal's own line ends
        assert not re.search("[\x80-\x9f\u202e\u200b\x07\r]", rest)
        for forbidden in ("\x1b]0", "\x1b]52", "\x1b[6n", "\x1b[31m"):
            assert forbidden not in text
        for word in ("owned", "‹9B›", "␛", "‹U+202E›", "[/INST]", "javascript:alert(1)", "<b>html</b>"):
            assert word in re.sub("\x1b[^a-zA-Z]*[a-zA-Z]", "", text), word
        running.type("\x11")
        assert running.end() == 0
        assert running.modes_left_on() == []


def test_hostile_paste_and_title_are_cleaned() -> None:
    with session() as running:
        start(running)
        running.type("\x1b[200~echo pasted \x9b31m \u202e\x1b[201~")
        running.wait_for("‹9B›")
        assert "\x9b" not in running.output.decode("utf-8", "replace")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_leaves_the_terminal_as_it_was(number: int, code: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with session(environment={"FAKE_ENGINE_LOG": str(log)}) as running:
        start(running)
        running.type("slow\r")
        running.wait_for("word")
        assert running.modes_left_on()
        running.process.send_signal(number)
        assert running.end() == code
        assert running.modes_left_on() == []
        assert all(gone(process) for process in engines(log))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from /proc")
def test_a_stopped_process_continues_with_one_thread_that_reads() -> None:
    """With two, one would wait for a key that the other has taken, and the app would not end before another key."""
    with session() as running:
        start(running)
        tasks = Path(f"/proc/{running.process.pid}/task")
        before = sum(1 for _ in tasks.iterdir())
        for _ in range(3):
            running.process.send_signal(signal.SIGSTOP)
            wait_until(lambda: (tasks.parent / "stat").read_text().split(") ")[1][0] == "T")
            running.output = b""
            running.process.send_signal(signal.SIGCONT)
            running.wait_for("\x1b[?1049h")
            running.wait_for("\x1b[?2004h")  # until then, the terminal itself may take Ctrl+Q
        wait_until(lambda: sum(1 for _ in tasks.iterdir()) <= before)
        running.type("\x11")
        assert running.end() == 0
        assert running.modes_left_on() == []


def test_a_signal_during_loading_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with session((*CHAT, "forever"), environment={"FAKE_ENGINE_LOG": str(log)}) as running:
        running.wait_for("loading weights")
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 143
        assert running.modes_left_on() == []
        assert all(gone(process) for process in engines(log))


def test_the_engine_ends_with_an_app_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with session(environment={"FAKE_ENGINE_LOG": str(log)}) as running:
        start(running)
        running.process.kill()
        running.process.wait()
        wait_until(lambda: all(gone(process) for process in engines(log)))


@pytest.mark.parametrize("keys", ["\x03\x03", "\x11"], ids=["control c", "control q"])
def test_keys_that_end_it_before_there_is_a_screen(keys: str) -> None:
    with session(typed_before=keys) as running:
        assert running.end() == 0
        assert b"error" not in running.output
        assert running.modes_left_on() == []


def test_what_was_typed_before_there_is_a_screen_waits_for_it() -> None:
    page_up, f2, escape = "\x1b[5~", "\x1bOQ", "\x1b[27u"
    with session(typed_before=f"{page_up}{f2}{page_up}{escape}typed early") as running:
        running.wait_for("typed early")


@pytest.mark.parametrize("moment", [b"\x1b[?1049h", b"\x1b[?2004h"])
def test_a_signal_before_there_is_a_screen(moment: bytes) -> None:
    with session() as running:
        while moment not in running.output:
            running.read(0.001)
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 143
        assert b"error" not in running.output
        assert running.modes_left_on() == []


def test_page_keys_in_a_palette_that_is_only_opening() -> None:
    with session() as running:
        start(running)
        running.type("\x10\x1b[5~\x1b[6~\x1b[5~")
        running.wait_for("Search for commands")
        running.read(0.5)
        running.type("\x1b[27u\x11")
        assert running.end() == 0


@pytest.mark.parametrize(
    ("opened_by", "shown"),
    [
        ("\x1bOQ", "Enter loads the model"),
        ("\x1bOR", "Enter saves"),
        ("\x0f", "Enter resumes"),
        ("\x10", "Search for commands"),
    ],
    ids=["model", "sampling", "sessions", "palette"],
)
def test_enter_pressed_twice_in_a_dialog(opened_by: str, shown: str, tmp_path: Path) -> None:
    with session(environment={"MINILLM_DATA": str(tmp_path)}) as running:
        start(running)
        running.type("echo something to save\r")
        running.wait_for("50.0 tok/s")
        running.type("\x0e")  # a new conversation
        running.type(opened_by)
        running.wait_for(shown)
        running.read(0.5)
        running.type("help" if opened_by == "\x10" else "\x1b[B")
        running.read(0.5)
        running.type("\r" * 4)
        running.read(0.7)
        running.type("\x1b[27u")
        running.read(0.1)
        running.type("\x11")
        assert running.end() == 0
        assert b"error" not in running.output


@pytest.mark.parametrize("keys", ["\x0e", "\x1b[1;3D\x0e", "\x1br\x0e\x1br"], ids=["new", "branch", "regenerate"])
def test_a_key_in_the_midst_of_a_question(keys: str) -> None:
    """The action of a key waits until the question is asked: no answer belongs to a conversation that is gone."""
    with session() as running:
        start(running)
        running.type("echo first\r")
        running.wait_for("50.0 tok/s")
        for _ in range(3):
            running.type("never\r" + keys)
            running.read(0.2)
        running.type("\x12")  # loads anew: an answer that is being given is lost
        start(running)
        running.type("echo whole\r")
        running.wait_for("50.0 tok/s")
        running.type("\x11\x11")  # on a busy machine a question may still wait, and the first key only says so
        assert running.end() == 0
        assert b"error" not in running.output


def test_an_app_that_does_not_end_tells_what_it_does() -> None:
    """The message of a test that fails gets this text."""
    with session() as running:
        running.wait_for("ready")
        running.type("never\r")
        running.wait_for("reading the prompt")
        running.type("and this\r")
        running.wait_for("question queued")
        with pytest.raises(AssertionError) as failed:
            running.end(0.1)
        told = str(failed.value)
        for fact in (
            "it does not end",
            "0 bytes of keys wait",
            "fake_engine.py",
            "'and this'",
            "engine: ready",
            "goes on",
        ):
            assert fact in told, (fact, told)


PATIENT = (
    sys.executable,
    "-c",
    "import sys, runpy; import minillm.ui.chat.quitting as quitting; quitting._GRACE = 60.0; "
    "sys.argv = ['chat', 'fake']; "
    f"runpy.run_path('{PROGRAMS}/chat_with_fake.py', run_name='__main__')",
)  # the second ctrl+c may come late


def test_control_c_stops_the_answer_and_then_quits() -> None:
    with session(PATIENT) as running:
        start(running)
        running.type("slow\r")
        running.wait_for("word")
        running.type("\x03")
        running.wait_for("stopped")
        running.type("\x03")
        running.wait_for("again to quit")  # written in two parts
        running.type("\x03")
        assert running.end() == 0
        assert running.modes_left_on() == []


def test_a_defect_of_the_app_restores_the_terminal_and_is_one_line() -> None:
    with session() as running:
        start(running)
        running.type("\x1b[24~")
        assert running.end() == 1
        assert running.modes_left_on() == []
        last = running.output.rpartition(b"\x1b[?1049l")[2].decode()
        assert "internal error: RuntimeError: a defect ␛[31mof the app" in last
        assert "Traceback" not in last
        assert len(last.strip().splitlines()) <= 2


def test_emoji_have_one_width_in_every_terminal(tmp_path: Path) -> None:
    text = "\u2764\ufe0f 1\ufe0f\u20e3 \u26a0\ufe0f \U0001f3f7\ufe0f \u231a\ufe0f"
    assert [cell_len(each) for each in text.split()] == [1, 1, 1, 1, 2], "as without the variation selectors"
    with session(environment={"MINILLM_DATA": str(tmp_path)}) as running:
        start(running)
        running.type(f"echo {text}\r")
        running.wait_for("50.0 tok/s")
        running.type("\x11")
        assert running.end() == 0
        assert "\u2764" in running.output.decode()
        assert "\ufe0f" not in running.output.decode()
    store = SessionStore(tmp_path / "conversations")
    [turn] = store.load(store.latest()).turns
    assert (turn.question, turn.answer.text.strip()) == (f"echo {text}", text), "saved as it was written"


def test_bytes_that_are_no_utf8_do_not_end_the_app() -> None:
    with session() as running:
        start(running)
        running.type_bytes(b"\xff\xfe\x80\xc3\x28")
        running.type("\x15echo alive\r")
        running.wait_for("50.0 tok/s")
        running.type("\x11")
        assert running.end() == 0


def test_any_size_and_a_storm_of_sizes() -> None:
    with session(size=(20, 5)) as running:
        running.wait_for("\x1b[?1049h")
        running.read(2)
        for step in range(40):
            running.resize(*((1, 1) if step % 4 == 0 else (10 + 5 * step, 2 + step)))
            running.read(0.01)
        running.resize(100, 30)
        running.type("echo survived\r")
        running.wait_for("50.0 tok/s")
        running.type("\x11")
        assert running.end() == 0
        assert running.modes_left_on() == []


@pytest.mark.weights
def test_without_a_terminal_the_chat_is_line_by_line(minillm_command: tuple[str, ...]) -> None:
    result = subprocess.run([*minillm_command, "chat"], input=b"hello\n", capture_output=True, timeout=300, check=False)
    assert result.returncode == 0
    assert result.stdout.strip()
    assert b"\x1b" not in result.stdout + result.stderr


@pytest.mark.weights
def test_on_a_dumb_terminal_the_chat_is_line_by_line(minillm_command: tuple[str, ...]) -> None:
    with session((*minillm_command, "chat"), environment={"TERM": "dumb"}) as running:
        running.wait_for("> ", 120)
        running.type("/help\r")
        running.wait_for("/accept N")
        running.type("/quit\r")
        assert running.end() == 0
        assert b"\x1b[" not in running.output.replace(b"\x1b[A", b"")


def test_without_color_every_state_still_reads() -> None:
    with session(environment={"NO_COLOR": "1"}, size=(120, 40)) as running:
        running.wait_for("ready in")
        running.type("echo hello\r")
        running.wait_for("50.0 tok/s")
        running.type("\x11")
        assert running.end() == 0
        colors = set(re.findall(rb"\x1b\[[0-9;]*38;2;(\d+);(\d+);(\d+)", running.output))
        assert all(red == green == blue for red, green, blue in colors), "shades of gray only"


@pytest.mark.weights
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_in_tmux_from_start_to_quit(tmp_path: Path) -> None:
    """Use it as people do: typed keys, a captured screen, ctrl-c at bad moments, and an intact shell at the end."""
    server = f"minillm-test-{os.getpid()}"

    def tmux(*arguments: str) -> str:
        command = ("tmux", "-L", server, "-f", "/dev/null", *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def until(text: str, seconds: float = 90) -> str:
        end = time.monotonic() + seconds
        while text not in (shown := tmux("capture-pane", "-p")):
            assert time.monotonic() < end, f"no {text!r} in\n{shown}"
            time.sleep(0.1)
        return shown

    chat = f"MINILLM_DATA={tmp_path} {sys.executable} -m minillm chat --temperature 0 --max-tokens 40"
    tmux("new-session", "-d", "-x", "130", "-y", "40", "sh")
    try:
        # Before the shell has read the line, ctrl-c takes it away; in the first instants Python itself answers.
        begun = """-c 'from minillm.cli.main import main; print("be" "gun", flush=True); raise SystemExit(main())'"""
        tmux("send-keys", f"{chat.replace('-m minillm', begun)}; echo ended $?", "Enter")
        until("begun")
        for _ in range(100):  # while Python starts, while the screen is made, while the engine starts: as it comes
            tmux("send-keys", "C-c")
            time.sleep(0.3)
            if tmux("display-message", "-p", "#{pane_current_command}").strip() == "sh":
                break
        tmux("send-keys", "echo the sh''ell", "Enter")
        until("the shell")
        ended = tmux("capture-pane", "-p", "-S", "-")  # with all that has left the pane at its top
        # One that comes when Python has given its handlers back kills it; then the shell drops the rest of the line.
        assert set(re.findall(r"ended (\d+)", ended)) <= {"0", "130"}, ended
        assert "error" not in ended, ended
        assert "Traceback" not in ended, ended
        tmux("send-keys", f"clear; {chat}; echo ended with $?", "Enter")
        until("ready in")
        tmux("send-keys", "What is the capital of France?", "Enter")
        until("Paris")
        until("first token")
        tmux("send-keys", "F7")
        until("▸strands")
        tmux("send-keys", "Tell me a long story.", "Enter")
        time.sleep(1.0)
        tmux("send-keys", "C-c")  # stops the answer, or it has ended
        until("● ready")
        tmux("send-keys", "C-q")
        until("ended with 0")
        tmux("send-keys", "clear; echo wh''ole again", "Enter")
        until("whole again")
        assert len(list(tmp_path.glob("conversations/*.json"))) == 1
    finally:
        tmux("kill-server")


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--temperature", "-1"), "temperature"), (("--block-size", "3"), "block_size"), (("--dtype", "int8"), "dtype")],
)
def test_wrong_options_are_said_before_the_screen_changes(options: tuple[str, ...], word: str) -> None:
    with session((sys.executable, "-m", "minillm", "chat", *options)) as running:
        assert running.end() == 2
        assert word.encode() in running.output
        assert b"\x1b" not in running.output


@pytest.mark.weights
def test_a_conversation_with_the_default_model_from_start_to_quit() -> None:
    command = (sys.executable, "-m", "minillm", "chat", "--temperature", "0", "--max-tokens", "24")
    with session(command, size=(160, 40)) as running:
        running.wait_for("ready in", 120)
        running.type("What is the capital of France?\r")
        running.wait_for("Paris", 120)
        running.wait_for(" · first token", 60)  # the line below a finished answer
        running.type("And of Italy?\r")
        running.wait_for("Rome", 120)
        running.wait_for(" cached", 60)
        running.type("\x11")
        assert running.end() == 0
        assert running.modes_left_on() == []


def test_the_hostile_text_holds_what_it_should() -> None:
    assert all(part in HOSTILE for part in ("\x1b]52", "\x1b[6n", "\x9b", "\u202e", "[/INST]"))
