"""The chat app on the terminal, with the scripted engine. Arguments: a model's name, "crash" to break on F12."""

from __future__ import annotations

import sys
from pathlib import Path

import minillm.cli.chat as command
from lib.programs import state_dump
from minillm.cli.main import main
from minillm.ui import app as chat_app
from minillm.ui.settings import Settings

FAKE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


class Breakable(chat_app.ChatApp):
    """F12 triggers a defect."""

    def key_f12(self) -> None:
        raise RuntimeError("a defect \x1b[31mof the app")


def run() -> int:
    app = Breakable(Settings(sys.argv[1] if len(sys.argv) > 1 else "fake"), engine_command=FAKE)
    code = state_dump.run(app)
    assert "torch" not in sys.modules, "the app's process must not import torch"
    return code


def start() -> int:
    """Run the app through the command line's own handling of errors and exit codes."""
    command.chat = lambda arguments: run()
    return main(["chat"])


if __name__ == "__main__":
    sys.exit(start())
