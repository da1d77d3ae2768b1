"""Test the events of the engine's process, as they arrive through a socket."""

from __future__ import annotations

import pytest

from minillm.server.client import EventProtocol
from minillm.service.call_messages import AnyEvent, Ended, Result, Text, Texts, encode

pytestmark = pytest.mark.anyio

EVENTS: list[AnyEvent] = [
    Texts([Text("a", 0, "word " * 100, 1), Text("b", 1, "", 0)]),
    Ended("a", 3, 0),
    Result("call-1", {"tokens": list(range(1000))}),
    Texts([Text("b", 1, "w\u00f6rd", 1, [], "length")]),
]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 1 << 20])
async def test_events_come_whole_and_in_order_however_the_socket_cuts_them(size: int) -> None:
    taken: list[AnyEvent] = []
    protocol = EventProtocol(taken.append)
    data = b"".join(map(encode, EVENTS))
    for start in range(0, len(data), size):
        protocol.data_received(data[start : start + size])
    assert taken == EVENTS


async def test_an_event_is_taken_as_soon_as_it_is_there() -> None:
    taken: list[AnyEvent] = []
    protocol = EventProtocol(taken.append)
    protocol.data_received(encode(EVENTS[0]) + encode(EVENTS[1])[:-1])
    assert taken == EVENTS[:1]


async def test_an_event_that_goes_wrong_goes_wrong_once() -> None:
    taken: list[AnyEvent] = []

    def take(event: AnyEvent) -> None:
        taken.append(event)
        if isinstance(event, Ended):
            raise ValueError("a defect")

    protocol = EventProtocol(take)
    with pytest.raises(ValueError, match="a defect"):
        protocol.data_received(encode(EVENTS[0]) + encode(EVENTS[1]))
    protocol.data_received(encode(EVENTS[2]))
    assert taken == EVENTS[:3]
