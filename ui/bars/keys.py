"""The last line: which keys there are. A click presses one.

Textual's own footer makes a widget of each key, and makes them all again whenever the focus moves: a sixth of the time
until the first screen.
"""

from __future__ import annotations

from textual import events
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

    def _keys(self) -> list[tuple[str, Content]]:
        """Each key's name, and its text in the line."""
        shown: list[tuple[str, Content]] = []
        room = self.content_size.width
        for _, binding, enabled, _ in self.screen.active_bindings.values():
            key = (f" {self.app.get_key_display(binding)} ", "bold $footer-key-foreground")
            text = Content.assemble(key, f"{binding.description} ")
            if binding.show and enabled and text.cell_length <= room:
                room -= text.cell_length
                shown.append((binding.key, text))
        return shown

    def render(self) -> Content:
        return Content("").join(text for _, text in self._keys())

    def on_click(self, event: events.Click) -> None:
        end = self.styles.padding.left
        for key, text in self._keys():
            end += text.cell_length
            if event.x < end:
                self.app.simulate_key(key)
                return
