"""``minillm demo``: the guided tour. It saves nothing among the user's conversations."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from minillm.errors import UsageError
from minillm.weights.manifest import default_model


def run(arguments: argparse.Namespace) -> int:
    from minillm.ui.chat.sessions import SessionStore
    from minillm.ui.settings import Settings
    from minillm.ui.terminal import check_terminal

    if not 0.1 <= arguments.speed <= 100:
        raise UsageError(f"--speed must be from 0.1 to 100, not {arguments.speed:g}")
    check_terminal()

    from minillm.ui.app import run
    from minillm.ui.demo import DemoApp, demo_settings

    settings = demo_settings(Settings(arguments.model or default_model(), theme=arguments.theme or ""))
    with tempfile.TemporaryDirectory(prefix="minillm-") as directory:
        return run(DemoApp(settings, SessionStore(Path(directory)), arguments.speed))
