"""The last line: which keys there are. A click presses one.

Textual's own footer makes a widget of each key, and makes them all again whenever the focus moves: a sixth of the time
until the first screen.
"""

from __future__ import annotations

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget


class KeyBar(Widget):
    """Every key of the screen that its binding shows, as far as there is room."""

    ALLOW_SELECT = False

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def _changed(self, screen: Screen[object]) -> None:
        if screen.is_current:
            self.refresh()

    def _keys(self) -> list[tuple[Binding, str]]:
        """The bindings with what stands for each."""
        shown: list[tuple[Binding, str]] = []
        width = 0
        for _, binding, enabled, _ in self.screen.active_bindings.values():
            text = f" {self.app.get_key_display(binding)} {binding.description} "
            if binding.show and enabled and width + len(text) <= self.content_size.width:
                width += len(text)
                shown.append((binding, text))
        return shown

    def render(self) -> Content:
        parts = []
        for _, text in self._keys():
            key, description = text.strip().split(maxsplit=1)
            parts.append(Content.assemble((f" {key} ", "bold $footer-key-foreground"), description, " "))
        return Content("").join(parts)

    def on_click(self, event: events.Click) -> None:
        end = self.styles.padding.left
        for binding, text in self._keys():
            end += len(text)
            if event.x < end:
                self.app.simulate_key(binding.key)
                return
