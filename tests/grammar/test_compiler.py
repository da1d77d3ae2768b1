"""Test the compiler of grammars in several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from minillm import Grammar
from minillm.grammar.compiler import Compiler
from minillm.grammar.matcher import Matcher
from minillm.grammar.vocabulary import Vocabulary


def test_two_threads_replace_a_matcher_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(Vocabulary([bytes([byte]) for byte in range(256)], lambda text: list(text.encode())))
    grammar, compile_ = Grammar.choice(["a"]), compiler._compile
    compiler.matcher(grammar).family.has_failed = True
    both_compile, first_has_ended = threading.Barrier(2), threading.Event()

    def compile_together(given: Grammar) -> Matcher:
        if both_compile.wait(60):
            assert first_has_ended.wait(60)
        return compile_(given)

    def first_or_second() -> Matcher:
        try:
            return compiler.matcher(grammar)
        finally:
            first_has_ended.set()

    monkeypatch.setattr(compiler, "_compile", compile_together)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(first_or_second) for _ in range(2)]
    assert [each.result().may_stop for each in found] == [False, False]
