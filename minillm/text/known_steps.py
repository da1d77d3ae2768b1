"""Which tokenizer.json may be used in this process: those whose every step takes time in proportion to the text.

Steps can be programs as chat templates can: an expression that takes for ever, a replacement that makes a thousand
characters of one, data that the library panics of. The others run in a `minillm.text.sandbox`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm.errors import WeightsError
from minillm.text.pre_tokenizers import SPLITS

STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}  # in sequences
_PATTERNS = {pattern for split in SPLITS.values() for pattern in split.patterns}
# How much longer a step may make a text, in bytes: Unicode's own figures for its forms.
_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 3, "Strip": 1, "StripAccents": 1, "Prepend": 1}
_GROWTH |= {"ByteLevel": 2, "Metaspace": 4, "Digits": 1, "Whitespace": 1, "WhitespaceSplit": 1, "Punctuation": 1}
_GROWTH |= {"TemplateProcessing": 1, "BertProcessing": 1, "RobertaProcessing": 1}
_MOST_GROWTH = 100.0
_MOST_STEPS = 32
_LONGEST = 64  # characters that a step puts before a text
_MOST_ADDED = 1 << 28  # bytes that the beginnings of all added tokens take


def is_known(document: Mapping[str, Any]) -> bool:
    """Whether nothing in a tokenizer.json is a program."""
    try:
        model = document["model"]
        affixes = [model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")]
        if "merges" not in model or model.get("type", "BPE") != "BPE" or model.get("dropout"):
            return False
        steps = [step for name, plural in STEPS.items() for step in _parts(document.get(name), plural)]
        growth = 1.0
        for step in steps:
            growth *= _growth(step)
        return growth <= _MOST_GROWTH and len(steps) <= _MOST_STEPS and not any(affixes)
    except (KeyError, TypeError, AttributeError, OverflowError):  # no such layout
        return False


def check_added(document: Mapping[str, Any]) -> None:
    """Raise WeightsError where the added tokens take more memory than those of any model."""
    tokens = document.get("added_tokens") or []
    lengths = [len(token["content"]) for token in tokens if isinstance(token, dict) and "content" in token]
    if sum(length * (length + 64) for length in lengths) > _MOST_ADDED:
        raise WeightsError(f"{len(lengths)} added tokens of up to {max(lengths)} characters, which no model has")


def _parts(step: Any, plural: str) -> list[Any]:
    """The steps of a sequence; a step alone."""
    if step is None:
        return []
    return step[plural] if step["type"] == "Sequence" else [step]


def _growth(step: Mapping[str, Any]) -> float:
    """How much longer a step makes a text; without bound where that is not known."""
    kind: Any = step["type"]
    pattern: Any = step.get("pattern")
    if kind == "Split" and pattern.get("Regex") in _PATTERNS:
        return 1
    if kind in ("Split", "Replace") and pattern.get("String"):
        return max(1.0, len(step.get("content", "").encode()) / len(pattern["String"].encode()))
    used = [part["SpecialToken"]["id"] for part in step.get("single", ()) if "SpecialToken" in part]
    if len(step.get("prepend", "")) > _LONGEST or not set(used) <= set(step.get("special_tokens", ())):
        return float("inf")
    return _GROWTH.get(kind, float("inf"))
