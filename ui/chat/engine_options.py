"""Options that the chat sets in a running engine process: the pinned system prompt, and the interval of reports."""

from collections.abc import Callable

from minillm.service.messages import Command, Pin, Report


class EngineOptions:
    """Sets options in the engine. It remembers their current values, and sends a command only if a value changes."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self.reset(ready=False)

    def reset(self, *, ready: bool) -> None:
        """Forget the options' values. Call this when a new engine process runs.

        ``ready``: the process has loaded its model. Until then, no options are sent.
        """
        self._ready, self._system, self._seconds = ready, "", 0.0

    def pin(self, system: str) -> None:
        """Pin the blocks of a system prompt, and unpin the blocks of the previous system prompt."""
        if self._ready and system != self._system:
            self._system = system
            self._send(Pin(system))

    def report(self, seconds: float) -> None:
        """Set the minimum number of seconds between two reports of the engine. Small changes are ignored."""
        if self._ready and abs(seconds - self._seconds) > 0.2 * self._seconds:
            self._seconds = seconds
            self._send(Report(seconds))
