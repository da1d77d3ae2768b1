"""The command palette: Textual's own, made safe against fast fingers."""

from __future__ import annotations

import contextlib

from textual import on
from textual.command import CommandPalette
from textual.widgets import Input, OptionList


class Palette(CommandPalette):
    """One that gives one command, however often Enter was pressed."""

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _take_only_one(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        if not self.is_active:
            event.prevent_default()  # it has closed: what is on top now would close, and the command would run again

    def _action_command_list(self, action: str) -> None:
        # The list has no lines yet between the arrival of commands and the next layout, and page keys look for them.
        with contextlib.suppress(KeyError):
            super()._action_command_list(action)
