"""``minillm chat`` and ``demo``: open the app, a chat line by line, or a guided tour.

Only this module of the package imports `minillm.ui`.
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cli.options import given
from minillm.cli.prompt_file import with_piped_text
from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.params import BeamSearchParams, SamplingParams
from minillm.progress import OnProgress
from minillm.service.process import ENGINE_COMMAND
from minillm.user_config import read_config

if TYPE_CHECKING:
    from minillm.llm import LLM
    from minillm.ui.terminal import TerminalAnswer


def chat(arguments: argparse.Namespace) -> int:
    """Chat with a model, in the app or line by line. Invalid options are reported before the terminal changes."""
    from minillm.ui.chat.sessions import SessionStore
    from minillm.ui.preferences import PreferencesFile
    from minillm.ui.settings import Settings, load_settings
    from minillm.ui.terminal import check_terminal, is_plain_only

    config = read_config(arguments.config)
    model, engine = config.choose_model(arguments.model), given(arguments, EngineConfig)
    sampling = given(arguments, SamplingParams)
    beams = {name: value for name, value in given(arguments, BeamSearchParams).items() if name not in sampling}
    flags = Settings(model, engine, sampling, beams, arguments.system or "", arguments.theme or "")
    preferences_file = PreferencesFile.of_user(arguments.config)
    settings = load_settings(config, flags, preferences_file.read())
    if "prompt_logprobs" in settings.sampling:
        raise UsageError(
            "prompt_logprobs work only in `minillm generate`, because the chat does not show them; leave them out"
        )
    store = replace(SessionStore.of_user(), saves=not arguments.no_save)
    resumed = store.load(store.latest()) if arguments.resume else None
    if resumed is not None and arguments.system is None:
        settings = replace(settings, system=resumed.system)
    is_plain = arguments.plain or is_plain_only()
    if arguments.server is not None and is_plain:
        why = "a chat line by line, as with --plain, runs the model in this process"
        raise UsageError(f"--server needs the app, and the app a terminal; {why}: leave out --server for it")
    if is_plain:
        from minillm.progress import loading_bar
        from minillm.ui.chat.conversation import Conversation
        from minillm.ui.plain import run as run_plain

        with loading_bar() as report:
            llm = load(settings.model, settings.engine, report)
        question = arguments.question or ""
        if question and not arguments.plain:  # with --plain, piped lines are more questions
            question = with_piped_text(question)
            resumed = resumed or Conversation(is_trial=True)  # one question and answer: nothing to continue
        return run_plain(llm, settings, store, resumed, question)
    check_terminal()
    gc.disable()  # no object of the first screen is garbage; collection would take a tenth of the time to draw it
    try:
        with _asking_background(settings.theme) as answer:  # importing Textual takes longer than most terminals' answer
            from minillm.ui.app import ChatApp, run
        settings = replace(settings, theme=settings.theme or answer.background)
        program = ENGINE_COMMAND if arguments.server is None else remote_engine(arguments.server)
        server = "" if arguments.server is None else program[-1]
        question = arguments.question or ""
        app = ChatApp(
            settings, store, resumed, question=question, preferences_file=preferences_file, engine_command=program,
            server=server,
        )  # fmt: skip
        return run(app, answer.typed)
    finally:
        gc.enable()


def load(model: str | None, engine: Mapping[str, Any], report: OnProgress) -> "LLM":
    """Load a model as the chat does: the best quantization that fits, with memory left for other programs."""
    from minillm.llm import LLM
    from minillm.loading.disk import with_chat_cache
    from minillm.loading.engine import best_form, chat_options
    from minillm.progress import say
    from minillm.ui.settings import for_desktop

    options = with_chat_cache(chat_options(for_desktop(dict(engine))))
    name = best_form(model, EngineConfig(**options), report, say)
    return LLM(name, on_progress=report, on_message=say, **options)


def remote_engine(url: str) -> tuple[str, ...]:
    """Return the command line of a process that connects to the engine of the server at ``url``.

    The app runs this process instead of a process with an engine of its own. Raises UsageError if ``url`` is invalid.
    """
    from minillm.server.sessions.remote import Address

    return (sys.executable, "-P", "-m", "minillm.server.sessions.remote", str(Address.parse(url)))


def demo(arguments: argparse.Namespace) -> int:
    """Run the guided tour. It saves no conversation."""
    from minillm.ui.chat.sessions import SessionStore
    from minillm.ui.settings import Settings
    from minillm.ui.terminal import check_terminal

    if not 0.1 <= arguments.speed <= 100:
        raise UsageError(f"--speed must be from 0.1 to 100, not {arguments.speed:g}")
    config = read_config(arguments.config)
    check_terminal("minillm demo")

    theme = arguments.theme or config.theme
    with _asking_background(theme) as answer:
        from minillm.ui.app import run
        from minillm.ui.demo import DemoApp, demo_settings

    theme = theme or answer.background
    settings = demo_settings(Settings(config.choose_model(arguments.model), config.engine, theme=theme))
    with tempfile.TemporaryDirectory(prefix="minillm-") as directory:
        return run(DemoApp(settings, SessionStore(Path(directory), keeps_blocks=False), arguments.speed), answer.typed)


def _asking_background(theme: str) -> "AbstractContextManager[TerminalAnswer]":
    """Ask the terminal for its background color, unless ``theme`` or the variable ``COLORFGBG`` is set.

    Return a context manager for the answer. The answer is read while the context is open, so code inside it need not
    wait.
    """
    from minillm.ui.terminal import TerminalAnswer, asking_background

    return nullcontext(TerminalAnswer()) if theme or os.environ.get("COLORFGBG") else asking_background()
