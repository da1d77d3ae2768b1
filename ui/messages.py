"""What screens and the app say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from textual.message import Message

from minillm.progress import Progress
from minillm.service.messages import Command, Event, Loaded

Phase = Literal["off", "loading", "ready", "failed", "crashed"]


@dataclass(frozen=True)
class EngineState:
    """How the engine's process is: what the title, the loading bar and the prompt depend on."""

    phase: Phase = "off"
    model: str = ""
    loading: Progress | None = None  # while phase is "loading"
    loaded: Loaded | None = None  # while phase is "ready"
    error: str = ""  # why phase is "failed" or "crashed"; not cleaned for a terminal


class EngineEvent(Message):
    """From the app to the chat screen: the engine said this."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class EngineCommand(Message):
    """From a screen to the app: tell the engine this."""

    def __init__(self, command: Command) -> None:
        super().__init__()
        self.command = command


class EngineChanged(Message):
    """The engine is in another state."""

    def __init__(self, state: EngineState) -> None:
        super().__init__()
        self.state = state
