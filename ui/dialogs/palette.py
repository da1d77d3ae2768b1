"""The command palette: Textual's own, made safe against fast fingers."""

from __future__ import annotations

from textual import on
from textual.widgets import Input, OptionList

from minillm.ui.textual_internals import PatientPalette


class Palette(PatientPalette):
    """One that gives one command, however often Enter was pressed."""

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _take_only_one(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        if not self.is_active:
            event.prevent_default()  # it has closed: the screen below would close, too, and the command would run again
