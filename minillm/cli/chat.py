"""``minillm chat``: the terminal app, or a chat line by line. With `demo`, the one place here that names `ui`."""

from __future__ import annotations

import argparse
import gc

from minillm.cli.options import beam_options, engine_options, sampling_options
from minillm.user_config import read_config


def run(arguments: argparse.Namespace) -> int:
    gc.disable()  # all objects of the first screen stay: to look for garbage among them takes a tenth of its time
    try:
        return _chat(arguments)
    finally:
        gc.enable()


def _chat(arguments: argparse.Namespace) -> int:
    # Wrong options are named before the terminal changes.
    from minillm.ui.chat.conversation import SessionStore
    from minillm.ui.settings import Settings, load_settings
    from minillm.ui.terminal import check_terminal, is_plain_only

    config = read_config(arguments.config)
    flags = Settings(
        model=config.choose_model(arguments.model),
        engine=engine_options(arguments),
        sampling=sampling_options(arguments),
        beams=beam_options(arguments),
        system=arguments.system or "",
        theme=arguments.theme or "",
    )
    settings = load_settings(config, flags)
    store = SessionStore.of_user()
    resumed = store.load(store.latest()) if arguments.resume else None
    if arguments.plain or is_plain_only():
        from minillm.llm import LLM
        from minillm.progress import loading_bar, say
        from minillm.ui.plain import run as run_plain

        gc.enable()
        with loading_bar() as report:
            llm = LLM(settings.model, on_progress=report, on_message=say, **settings.engine)
        return run_plain(llm, settings, store, resumed, arguments.question or "")
    check_terminal()

    from minillm.ui.app import ChatApp, run

    return run(ChatApp(settings, store, resumed, question=arguments.question or ""))
