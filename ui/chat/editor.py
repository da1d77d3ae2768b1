"""Edit a text in the user's own editor, while the app is suspended."""

import os
import shlex
import signal
import subprocess
import tempfile
from pathlib import Path

from minillm.errors import UsageError
from minillm.ui.textual_internals import CrashStoringApp


def edited(app: CrashStoringApp, text: str) -> str:
    """Open ``text`` in ``$VISUAL``, ``$EDITOR`` or vi. Return the text as the user has saved it.

    Raises:
        UsageError: the editor cannot be started or failed, or the app has no terminal for it.
    """
    if not app.can_suspend:
        raise UsageError("there is no terminal for an editor")
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
        path = Path(folder, "question.md")
        path.write_text(text, encoding="utf-8", errors="replace")
        before = signal.signal(signal.SIGINT, lambda *_: None)  # the editor handles ctrl+c
        try:
            with app.suspend():
                code = subprocess.run([*shlex.split(command), str(path)], check=False).returncode
            written = path.read_bytes().decode("utf-8", "replace")
        except (OSError, ValueError) as error:
            raise UsageError(f"{command} cannot be run: {error}; set EDITOR to another editor") from None
        finally:
            signal.signal(signal.SIGINT, before)
    if code:
        raise UsageError(f"{command} ended with code {code}: your text is unchanged")
    return written.rstrip("\n")
