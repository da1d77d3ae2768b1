"""``minillm demo``: the guided tour. It saves nothing among the user's conversations."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from minillm.errors import UsageError
from minillm.user_config import read_config


def run(arguments: argparse.Namespace) -> int:
    from minillm.ui.chat.conversation import SessionStore
    from minillm.ui.settings import Settings
    from minillm.ui.terminal import check_terminal

    if not 0.1 <= arguments.speed <= 100:
        raise UsageError(f"--speed must be from 0.1 to 100, not {arguments.speed:g}")
    config = read_config(arguments.config)
    check_terminal()

    from minillm.ui.app import run
    from minillm.ui.demo import DemoApp, demo_settings

    theme = arguments.theme or config.theme
    settings = demo_settings(Settings(config.choose_model(arguments.model), config.engine, theme=theme))
    with tempfile.TemporaryDirectory(prefix="minillm-") as directory:
        return run(DemoApp(settings, SessionStore(Path(directory)), arguments.speed))
