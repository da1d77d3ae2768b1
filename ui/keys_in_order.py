"""Text fields that handle keys in the order in which they were pressed."""

from __future__ import annotations

from textual import events
from textual.widget import Widget
from textual.widgets import Input


class KeysInOrder:
    """Mixin for a text field: keys that arrive together are handled in their order.

    The field inserts characters in its own task, but Textual runs the binding of a key such as Backspace in the app's
    task. If the app is busy or the connection slow, characters typed after Backspace would be inserted before it runs.
    """

    async def on_key(self, event: events.Key) -> None:
        """Run the field's own binding of the key, if it has one."""
        assert isinstance(self, Widget)
        found = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if found is not None and found.node is self and found.enabled:
            event.stop()
            event.prevent_default()
            await self.run_action(found.binding.action)


class OrderedInput(KeysInOrder, Input):
    """A text field of one line."""
