"""Messages between the app and its screens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from textual.message import Message

from minillm.progress import Progress
from minillm.service.messages import Command, Event, Loaded

Phase = Literal["off", "loading", "ready", "failed", "crashed"]


@dataclass(frozen=True)
class EngineState:
    """The state of the engine's process: the title, the loading bar and the prompt depend on it."""

    phase: Phase = "off"
    model: str = ""
    loading: Progress | None = None  # while phase is "loading"
    loaded: Loaded | None = None  # while phase is "ready"
    error: str = ""  # why phase is "failed" or "crashed"; not cleaned for a terminal


@dataclass
class EngineEvent(Message, bubble=False):
    """From the app to the chat screen: the engine said this."""

    event: Event


@dataclass
class EngineCommand(Message):
    """From a screen to the app: tell the engine this."""

    command: Command


@dataclass
class EngineChanged(Message, bubble=False):
    """The engine is in another state."""

    state: EngineState


@dataclass
class CommandAsked(Message):
    """From a widget of the talk: run this slash command."""

    name: str
    argument: str = ""
