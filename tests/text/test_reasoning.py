"""Reasoning and answer are split wherever the streamed text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minillm.text.reasoning import ReasoningSplitter, split_reasoning


def test_reasoning_is_split_off() -> None:
    assert split_reasoning("<think>hm</think>yes") == ("hm", "yes")
    assert split_reasoning("hm</think>yes", inside=True) == ("hm", "yes")
    assert split_reasoning("a <b> c</think> d") == ("", "a <b> c</think> d")
    assert split_reasoning("<think>never closed") == ("never closed", "")
    assert split_reasoning("ends with <thi") == ("", "ends with <thi")


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "thin", "k>", "/", "x"]), max_size=12), st.data())
def test_reasoning_does_not_depend_on_how_the_text_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    splitter = ReasoningSplitter()
    pieces: list[tuple[bool, str]] = []
    while text:
        cut = data.draw(st.integers(1, len(text)))
        pieces += splitter.push(text[:cut])
        text = text[cut:]
    pieces += splitter.finish()
    whole = split_reasoning("".join(parts))
    assert ("".join(t for inside, t in pieces if inside), "".join(t for inside, t in pieces if not inside)) == whole
