"""The command palette: Textual's own."""

from __future__ import annotations

import contextlib

from textual.command import CommandPalette


class Palette(CommandPalette):
    """Its list has no lines yet between the arrival of commands and the next layout; Textual's page keys need them."""

    def _action_command_list(self, action: str) -> None:
        with contextlib.suppress(KeyError):
            super()._action_command_list(action)
