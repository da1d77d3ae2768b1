"""``minillm chat``: the terminal app, or a chat line by line. With `demo`, the one place here that names `ui`."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from minillm.cli.main import ENGINE_OPTIONS, SAMPLING_OPTIONS, given
from minillm.weights.manifest import default_model

_BEAM_OPTIONS = ("beam_width", "length_penalty")


def run(arguments: argparse.Namespace) -> int:
    gc.disable()  # all objects of the first screen stay: to look for garbage among them takes a tenth of its time
    try:
        return _chat(arguments)
    finally:
        gc.enable()


def _chat(arguments: argparse.Namespace) -> int:
    # Wrong options are named before the terminal changes.
    from minillm.ui.chat.sessions import SessionStore
    from minillm.ui.settings import Settings, config_path, load_settings
    from minillm.ui.terminal import check_terminal, is_plain_only

    flags = Settings(
        model=arguments.model or "",
        engine=given(arguments, ENGINE_OPTIONS),
        sampling=given(arguments, SAMPLING_OPTIONS),
        beams=given(arguments, _BEAM_OPTIONS),
        system=arguments.system or "",
        theme=arguments.theme or "",
    )
    path = Path(arguments.config).expanduser() if arguments.config else config_path()
    settings = load_settings(path, default_model(), flags, must_exist=bool(arguments.config))
    store = SessionStore.of_user()
    resumed = store.load(store.latest()) if arguments.resume else None
    if arguments.plain or is_plain_only():
        from minillm.cli.bars import loading_bar, say
        from minillm.llm import LLM
        from minillm.ui.plain import run as run_plain

        gc.enable()
        with loading_bar() as report:
            llm = LLM(settings.model, on_progress=report, on_message=say, **settings.engine)
        return run_plain(llm, settings, store, resumed)
    check_terminal()

    from minillm.ui.app import ChatApp, run

    return run(ChatApp(settings, store, resumed))
