"""Accepted forms of a prompt, and their normal form: text, or token ids as a list of Python's own ints."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from operator import countOf, index
from typing import Any

from minillm.errors import UsageError

Prompt = str | Sequence[int]


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list; `plain_ids` refuses each that is none. Raises UsageError if this is neither."""
    found = _unwrapped(prompts)
    found = found.tolist() if hasattr(found, "tolist") else found  # an array or a tensor
    if isinstance(found, str):
        return [found]
    if not isinstance(found, Iterable) or isinstance(found, bytes | bytearray | Mapping):
        raise UsageError(f"prompts are text, token ids, or a list of either, not {type(prompts).__name__}")
    many = list(found)
    return [many] if many and isinstance(many[0], Integral) else [_unwrapped(each) for each in many]


def plain_ids(prompt: Any) -> list[int]:
    """Token ids from a list, a range, an array or a tensor, checked against no vocabulary. Else raises UsageError."""
    found = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # an array or a tensor
    if not isinstance(found, Sequence) or isinstance(found, str | bytes | bytearray):
        raise UsageError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    ids = list(found)
    if countOf(map(type, ids), int) != len(ids):  # numpy's integers, say; values that are no integer are refused later
        ids = [index(i) if isinstance(i, Integral) and not isinstance(i, bool) else i for i in ids]
    return ids


def _unwrapped(prompt: Any) -> Any:
    """The ids or the text of vLLM's dictionaries: ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or both."""
    if isinstance(prompt, Mapping) and prompt and set(prompt) <= {"prompt", "prompt_token_ids"}:
        return prompt.get("prompt_token_ids", prompt.get("prompt"))
    return prompt
