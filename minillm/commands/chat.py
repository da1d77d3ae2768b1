"""``minillm chat``: the terminal app. The one place of this package that names `ui`, which lies above it."""

from __future__ import annotations

import argparse

from minillm.cli import ENGINE_OPTIONS, SAMPLING_OPTIONS, given
from minillm.config import EngineConfig
from minillm.decoding.params import SamplingParams


def run(arguments: argparse.Namespace) -> int:
    # Whatever is wrong with the options is said before the terminal changes.
    from ui.terminal import check_terminal

    check_terminal()
    engine = given(arguments, ENGINE_OPTIONS)
    EngineConfig(**engine)

    from minillm.weights.manifest import default_model
    from ui.settings import CHAT_SAMPLING, Settings

    sampling = {**CHAT_SAMPLING, **given(arguments, SAMPLING_OPTIONS)}
    SamplingParams.from_mapping(sampling)

    from ui.app import ChatApp, run

    return run(ChatApp(Settings(arguments.model or default_model(), engine, sampling, arguments.system or "")))
