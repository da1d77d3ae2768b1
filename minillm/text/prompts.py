"""What callers may give as prompts, and what becomes of it: text, or token ids as a list of Python's own ints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from operator import countOf, index
from typing import Any

from minillm.errors import UsageError

Prompt = str | Sequence[int]


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    found = _as_python(prompts)
    if not isinstance(found, Iterable) or isinstance(found, bytes | bytearray | Mapping):
        raise UsageError(f"prompts are text, token ids, or a list of either, not {type(prompts).__name__}")
    many = list(found)
    return [many] if many and isinstance(many[0], Integral) else many


def plain_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids from a list, a range, an array or a tensor. Whether the model has them is not looked at.

    Raises:
        UsageError: it is no sequence.
    """
    found = _as_python(prompt)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes | bytearray):
        raise UsageError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    ids = list(found)
    if countOf(map(type, ids), int) != len(ids):  # numpy's integers, say; what is no integer stays for who checks ids
        ids = [index(i) if isinstance(i, Integral) and not isinstance(i, bool) else i for i in ids]
    return ids


def _as_python(value: Any) -> Any:
    """Lists in place of arrays and tensors."""
    return value.tolist() if hasattr(value, "tolist") else value
