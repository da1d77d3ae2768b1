"""Test events of an untrusted server: contradictions are errors, and the rest is safe and bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import asdict

from minillm.service.checks import EventReader
from minillm.service.messages import (
    BlockFacts,
    CacheChanged,
    Event,
    Generate,
    Loaded,
    LoadFailed,
    LogEntry,
    Notice,
    RequestFailed,
    TableView,
    TextDelta,
    encode,
)
from minillm.text.safe import clean

EVIL = "\x1b]52;c;b3duZWQ=\x07\x1b]0;OWNED\x07\x1b[31mRED\x1b[2J\x9b31m\u202eevil"
LOADED = Loaded("m", "s", "cpu", "float32", 512, 16, 64, 8, 1_000, True, 1.0)
TABLE = TableView(1, "a", 0, "running", 20, [3, 5])
CHANGED: dict[str, Any] = {"message": "CacheChanged"}


def line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode()


def row(**changes: object) -> list[object]:
    """A block table as it travels."""
    return list({**asdict(TABLE), **changes}.values())


def entry(**changes: object) -> list[object]:
    return list({**asdict(LogEntry(1.0, "free", 1, "a", [3])), **changes}.values())


def after_loading(**options: object) -> EventReader:
    reader = EventReader()
    reader.note(Generate("r", "c", [], dict(options)))
    reader.read(encode(LOADED))
    return reader


def loaded(**changes: object) -> bytes:
    return line({"message": "Loaded", **asdict(LOADED), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 1 << 62},
        {"num_blocks": 1 << 31},
        {"num_blocks": 10**400},
        {"num_blocks": 0},
        {"num_blocks": -5},
        {"num_host_blocks": 1 << 60},
        {"num_host_blocks": -1},
        {"block_size": 0},
        {"max_model_len": 0},
        {"max_model_len": -1},
        {"block_bytes": -1},
        {"seconds": -1.0},
        {"seconds": 1e300},
    ],
)
def test_no_pool_is_made_of_impossible_numbers(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError) as caught:
        EventReader().read(loaded(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "event",
    [
        {"tables": [row(blocks=[64])]},
        {"tables": [row(blocks=[-1])]},
        {"tables": [row(blocks=[1 << 40])]},
        {"tables": [row(state="swapped", blocks=[8])]},
        {"tables": [row(state=EVIL)]},
        {"tables": [row(index=-1)]},
        {"tables": [row(num_tokens=-1)]},
        {"tables": [row(num_tokens=1 << 60)]},
        {"tables": [row(keep=5)]},
        {"tables": [row(keep=-1)]},
        {"tables": [row(), row(state="swapped", keep=1, blocks=[])]},
        {"tables": [row(), row(keep=3)]},
        {"tables": [row(seq_id=number, blocks=[]) for number in range(70_000)]},
        {"tables": [row(seq_id=number, blocks=[0] * 100_000) for number in range(43)]},
        {"cached": [64]},
        {"uncached": [1 << 50]},
        {"cached": [-3]},
        {"words": {"64": "x"}},
        {"words": {"-1": "x"}},
        {"log": [entry(kind="copy", blocks=[])]},
        {"log": [entry(kind="copy", blocks=[1])]},
        {"log": [entry(kind="copy", blocks=[1, 2, 3])]},
        {"log": [entry(blocks=[64])]},
        {"log": [entry(time=1e300)]},
        {"log": [entry(detail=-1)]},
        {"log": [entry()] * 10_001},
        {"counts": [-1]},
        {"num_unlogged": -1},
    ],
)
def test_a_picture_that_contradicts_the_pool_is_an_error(event: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        after_loading().read(line({**CHANGED, **event}))


@pytest.mark.parametrize(
    "event",
    [
        {"message": "TextDelta", "request_id": "r", "index": 2, "text": "x", "num_tokens": 1},
        {"message": "TextDelta", "request_id": "r", "index": -1, "text": "x", "num_tokens": 1},
        {"message": "TextDelta", "request_id": "r", "index": 0, "text": "x", "num_tokens": -1},
        {"message": "Finished", "request_id": "r", "index": 2, "finish_reason": "stop", "num_output_tokens": 1,
         "tokens_per_second": 1.0, "num_context_tokens": 1},
        {"message": "Finished", "request_id": "r", "index": 0, "finish_reason": EVIL, "num_output_tokens": 1,
         "tokens_per_second": 1.0, "num_context_tokens": 1},
        {"message": "Reading", "request_id": "r", "num_computed_tokens": 5, "num_prompt_tokens": 0,
         "seconds_left": 1.0},
        {"message": "Loading", "progress": {"label": "x", "done": -1, "total": 3, "unit": ""}},
        {"message": "Loading", "progress": {"label": "x", "done": 1, "total": 10**400, "unit": ""}},
        {"message": "MemoryUse", "total": 0, "free": -1, "weights": 0, "cache": 0, "rest": 0},
        {"message": "Stepped", "steps": [
            {"number": 1, "num_prefills": 0, "num_prefill_tokens": 0, "num_decodes": 1, "num_preempted": 0,
             "num_swapped_out": 0, "num_swapped_in": 0, "seconds": 1e-300, "device_seconds": -1e300, "ended": 1.0}]},
        {"message": "BlockFacts", "block": 0, "tokens": ["x"] * 17, "node": None, "before": "", "age": None},
        {"message": "Loaded", **asdict(LOADED)},
        {"message": "Preparing", "done": 3, "total": 2},
        {"message": "Preparing", "done": -1, "total": 2},
    ],
)  # fmt: skip
def test_other_events_out_of_range_are_errors(event: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        after_loading(n=2).read(line(event))


def test_an_answer_does_not_grow_without_end() -> None:
    reader = after_loading()
    delta = TextDelta("r", 0, "x" * (1 << 23), 1)
    for _ in range(4):
        reader.read(encode(delta))
    with pytest.raises(ValueError, match="an answer of more than"):
        reader.read(encode(delta))


@pytest.mark.parametrize("event", [CacheChanged(), TextDelta("r", 0, "x", 1)])
def test_nothing_is_told_of_a_pool_before_there_is_one(event: Event) -> None:
    with pytest.raises(ValueError, match="before a model was loaded"):
        EventReader().read(encode(event))


def test_names_and_errors_are_safe_for_a_terminal() -> None:
    """Model output is not: widgets clean it, for a file gets it as it is."""
    reader = EventReader()
    facts = reader.read(loaded(model=EVIL, source=EVIL, device=EVIL, dtype=EVIL * 100))
    assert isinstance(facts, Loaded)
    table = row(owner=EVIL)
    log = [entry(kind=EVIL, owner=EVIL)]
    picture = reader.read(line({**CHANGED, "tables": [table], "log": log, "words": {"0": "x" * 9_999}}))
    assert isinstance(picture, CacheChanged)
    names = [facts.model, facts.source, facts.device, facts.dtype, picture.tables[0].owner]
    names += [picture.log[0].kind, picture.log[0].owner]
    for event in (LoadFailed(EVIL * 1_000, 1), Notice(EVIL), RequestFailed("r", EVIL)):
        read = reader.read(encode(event))
        names.append(read.text if isinstance(read, Notice) else read.error)  # type: ignore[attr-defined]
    block = reader.read(encode(BlockFacts(0, [], None, EVIL, None)))
    assert isinstance(block, BlockFacts)
    names.append(block.before)
    for name in names:
        assert name == clean(name)
        assert name.startswith("␛]52;c;b3duZWQ=␇")
        assert len(name) < 20_000
    assert len(picture.words[0]) == 200
    delta = reader.read(encode(TextDelta("r", 0, EVIL, 1)))
    assert isinstance(delta, TextDelta)
    assert delta.text == EVIL


def test_honest_events_pass_unchanged() -> None:
    reader = after_loading(beam_width=3)
    swapped = TableView(1, "a", 0, "swapped", 20, [0, 7])
    events = [
        CacheChanged([TABLE], log=[LogEntry(0.5, "copy", 1, "a", [3, 4], None, 2), LogEntry(1.0, "evict", -1, "", [])]),
        CacheChanged([TableView(1, "a", 0, "idle", 40, [63], keep=2)], words={63: "end"}),
        CacheChanged([swapped], cached=[3, 63]),
        CacheChanged([TABLE], uncached=[3]),
        CacheChanged(gone=[1, 9]),
        TextDelta("r", 2, "x", 1),
        TextDelta("of another chat", 7, "x", 1),
    ]
    for event in events:
        assert reader.read(encode(event)) == event
