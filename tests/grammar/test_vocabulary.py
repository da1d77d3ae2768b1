"""Test token masks against brute force in Python."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from lib.tokens import byte_level, metadata_of, random_texts, sentencepiece
from minillm import Grammar
from minillm.errors import UsageError
from minillm.grammar.compiler import Compiler
from minillm.grammar.matcher import Matcher
from minillm.grammar.vocabulary import Vocabulary
from minillm.text.tokenizer import Tokenizer

CHOICES = ["the quick", "the quack", "then", "naïve 🎉", "quick", '{"a": 1}', "a\nb", "x" * 12]


def tokenizer_of(kind: str, directory: Path) -> Tokenizer:
    if kind == "sentencepiece":
        return Tokenizer.from_directory(sentencepiece(directory))
    byte_level(directory)
    return (
        Tokenizer.from_gguf(metadata_of(directory, "smollm")) if kind == "gguf" else Tokenizer.from_directory(directory)
    )


@pytest.fixture(params=["byte level", "sentencepiece", "gguf"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return tokenizer_of(request.param, tmp_path)


@pytest.fixture
def vocabulary(tokenizer: Tokenizer) -> tuple[list[bytes], Vocabulary]:
    """Return the tokenizer's vocabulary, followed by unused rows of the embedding."""
    control = tokenizer.control_ids
    tokens = [b"" if i in control else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size + 45)]
    return tokens, Vocabulary(tokens, lambda text: tokenizer.encode(text, add_special_tokens=False))


def allowed(vocabulary: Vocabulary, matchers: list[Matcher]) -> list[set[int]]:
    words = np.zeros((len(matchers), vocabulary.num_words), dtype=np.uint32)
    vocabulary.fill([matcher.state for matcher in matchers], words)
    return [{i for i in range(vocabulary.num_words * 32) if int(row[i // 32]) >> (i % 32) & 1} for row in words]


def test_choices_are_followed_as_brute_force_would(vocabulary: tuple[list[bytes], Vocabulary]) -> None:
    tokens, ours = vocabulary
    compiler, rng = Compiler(ours), random.Random(1)
    wanted = [choice.encode() for choice in CHOICES]
    ends = set()
    for _ in range(60):
        matcher, text = compiler.matcher(Grammar.choice(CHOICES)), b""
        while True:
            fitting = {i for i, data in enumerate(tokens) if data and any(w.startswith(text + data) for w in wanted)}
            assert matcher.may_stop == (text in wanted)
            assert matcher.is_complete([0]) == (not fitting)
            if not fitting:
                break
            [found] = allowed(ours, [matcher])
            assert found
            assert found <= fitting
            if len({w[len(text)] for w in wanted if w.startswith(text) and len(w) > len(text)}) > 1:
                assert found == fitting, "only where the next byte is certain the tokenizer's own token is taken"
            token_id = rng.choice(sorted(found))
            matcher.advance(token_id)
            assert matcher.error is None
            text += tokens[token_id]
        ends.add(text)
    assert ends == {w for w in wanted if not any(other != w and other.startswith(w) for other in wanted)}


def test_several_masks_at_a_time_are_those_of_each_alone(vocabulary: tuple[list[bytes], Vocabulary]) -> None:
    _, ours = vocabulary
    compiler, rng = Compiler(ours), random.Random(2)
    matchers = [compiler.matcher(Grammar.json()) for _ in range(9)]
    for _ in range(20):
        together = allowed(ours, matchers)
        assert together == [allowed(ours, [matcher])[0] for matcher in matchers]
        for matcher, found in zip(matchers, together, strict=True):
            if found:
                matcher.advance(rng.choice(sorted(found)))
    assert len({frozenset(found) for found in together}) > 1


def test_copies_go_their_own_ways(vocabulary: tuple[list[bytes], Vocabulary]) -> None:
    tokens, ours = vocabulary
    matcher = Compiler(ours).matcher(Grammar.regex("[ab]{3}"))
    before = allowed(ours, [matcher])
    for letter in (b"a", b"b"):
        copy = matcher.copy()
        for _ in range(3):
            copy.advance(tokens.index(letter))
        assert copy.is_complete([0])
    assert allowed(ours, [matcher]) == before
    assert not matcher.may_stop


def test_a_token_that_may_not_follow_is_an_error_that_stays(vocabulary: tuple[list[bytes], Vocabulary]) -> None:
    tokens, ours = vocabulary
    compiler = Compiler(ours)
    for token_id, ends in ((tokens.index(b"x"), False), (0, True), (0, False), (len(tokens) + 5, False)):
        matcher = compiler.matcher(Grammar.regex("ab?"))
        matcher.advance(token_id, ends=ends)
        assert matcher.error is not None
        assert matcher.error.is_usage
        assert not matcher.may_stop
        matcher.advance(tokens.index(b"a"))
        assert matcher.error is not None
        assert matcher.copy().error == matcher.error


def test_a_grammar_that_exceeds_its_limits_is_a_usage_error(vocabulary: tuple[list[bytes], Vocabulary]) -> None:
    tokens, ours = vocabulary
    doubled = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(30))  # 2**30 letters
    matcher = Compiler(ours).matcher(Grammar.lark(f'start: r0\n{doubled}r30: "a"'))
    matcher.advance(tokens.index(b"a"))
    allowed(ours, [matcher])
    if matcher.error is None:
        matcher.note_error()
    assert matcher.error is not None
    assert matcher.error.text.startswith("the grammar failed: ")
    assert matcher.error.is_usage
    assert matcher.family.has_failed


def test_texts_are_spelled_by_the_tokenizer_within_other_text(
    tokenizer: Tokenizer, vocabulary: tuple[list[bytes], Vocabulary]
) -> None:
    tokens, ours = vocabulary
    for text in ("the quick", " the", 'a\n{"', "é🎉", "\x02", "", "a<|im_end|>b", "\udce9", *random_texts(100)):
        wanted = text.encode("utf-8", "surrogateescape")
        ids = ours.encode(text)
        assert b"".join(tokens[token_id] for token_id in ids) == wanted
        if text.isprintable():
            alone = tokenizer.encode(text, add_special_tokens=False)
            if b"".join(map(tokenizer.token_bytes, alone)) == wanted:  # not where it puts a space before each text
                assert ids == alone


def test_what_no_token_spells_is_refused(vocabulary: tuple[list[bytes], Vocabulary]) -> None:
    few = Compiler(Vocabulary([b"", b"a", b"b"], lambda text: [{"a": 1, "b": 2}.get(letter, 0) for letter in text]))
    assert few.matcher(Grammar.regex("[abc]+")).error is None
    with pytest.raises(Exception, match="no text that this model's tokens can spell"):
        few.matcher(Grammar.regex("c+"))


def test_a_text_that_the_tokenizer_refuses_is_spelled_by_the_longest_tokens() -> None:
    def refuse(text: str) -> list[int]:
        raise UsageError("no such text")

    ours = Vocabulary([b"", b"a", b"ab", b"b", b"abc", b"d"], refuse)
    assert [ours.encode(text) for text in ("abcd", "abd", "aba", "bxa", "")] == [[4, 5], [2, 5], [2, 1], [3], []]


def test_spellings_are_all_tokens_that_may_follow() -> None:
    tokens = [b"", b"a", b"ab", b"b", b"abc", b"abx", b"abce", b"d", b"c"]
    ours = Vocabulary(tokens, lambda text: [tokens.index(each.encode()) for each in text if each in "abcd"])
    found = Compiler(ours).matcher(Grammar.regex("ab[cd]")).spellings()
    assert [tokens[token_id] for token_id in found] == [b"a", b"ab", b"abc"]


def test_only_the_beginning_of_a_long_forced_text_is_encoded() -> None:
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [{"a": 1, "b": 2}.get(letter, 0) for letter in text]

    ours = Vocabulary([b"", b"a", b"b"], encode)
    matcher = Compiler(ours).matcher(Grammar.regex("a{5000}b"))
    for _ in range(5000):
        assert allowed(ours, [matcher]) == [{1}]
        matcher.advance(1)
    assert allowed(ours, [matcher]) == [{2}]
    assert max(map(len, texts)) < 3000


@pytest.mark.parametrize("least", [0, 3])
def test_bounded_strings_of_json_are_followed_as_brute_force_would(
    vocabulary: tuple[list[bytes], Vocabulary], least: int
) -> None:
    """The library allows all tokens of a length at once, which is wrong near a string's maximum length.

    Tokens that begin an escape or a character of several bytes are left out, to keep the brute force short.
    """
    tokens, ours = vocabulary
    most = 14
    plain = [i for i, data in enumerate(tokens) if data and all(32 <= byte < 127 and byte != 92 for byte in data)]
    grammar = Grammar.json({"type": "string", "minLength": least, "maxLength": most})
    rng = random.Random(2)
    lengths = set()
    for _ in range(25):
        matcher, text = Compiler(ours).matcher(grammar), b""
        while not text.endswith(b'"') or len(text) == 1:
            [found] = allowed(ours, [matcher])

            def fits(data: bytes, text: bytes = text) -> bool:
                whole = text + data
                if not whole.startswith(b'"'):
                    return False
                inner, quote, behind = whole[1:].partition(b'"')
                return len(inner) <= most and not behind and (not quote or len(inner) >= least)

            expected = {i for i in plain if fits(tokens[i])}
            if len({tokens[i] for i in expected}) == 1:  # no choice of bytes: not all tokens that spell them
                assert found & set(plain) <= expected
            else:
                assert found & set(plain) == expected
            assert found & expected
            lengths.add(len(text))
            longer = sorted(expected, key=lambda i: (b'"' in tokens[i], rng.random()))
            token_id = longer[0] if rng.random() < 0.9 else rng.choice(longer)
            matcher.advance(token_id)
            text += tokens[token_id]
    assert lengths >= {0, 1, most - 1, most, most + 1}
