"""The values that may be a prompt, and the errors for all others."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from minillm.errors import UsageError
from minillm.text.prompts import plain_ids, prompt_list


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        (iter(("a", "b")), ["a", "b"]),
        ([1, 2], [[1, 2]]),
        (range(2), [[0, 1]]),
        (np.array([1, 2]), [[1, 2]]),
        ([np.int64(1), 2], [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([torch.tensor([1, 2]), "b", (3,)], [[1, 2], "b", [3]]),
        ([], []),
    ],
)
def test_one_prompt_or_several(given: Any, prompts: list[Any]) -> None:
    found = [each if isinstance(each, str) else plain_ids(each) for each in prompt_list(given)]
    assert found == prompts
    assert all(type(i) is int for each in found if not isinstance(each, str) for i in each)


@pytest.mark.parametrize("given", [None, 3, True, b"abc", {"a": 1}, 1.5, object, torch.tensor(3)], ids=str)
def test_what_is_no_prompt_is_named(given: Any) -> None:
    with pytest.raises(UsageError, match="prompts are text, token ids, or a list of either, not"):
        prompt_list(given)
    with pytest.raises(UsageError, match="a prompt is text or a list of token ids, not"):
        plain_ids(given)


@pytest.mark.parametrize("wrong", ["x", True, None, 1.5, [2]], ids=str)
def test_what_is_no_token_id_is_named(wrong: Any) -> None:
    """Some methods look ids up without a vocabulary to check them, such as `LLM.explain_miss`."""
    with pytest.raises(UsageError, match=re.escape(f"and {wrong!r} is no token id")):
        plain_ids([1, wrong])
