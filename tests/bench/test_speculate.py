"""Test the weights of `minillm bench speculate` that continue token t with t + 1, and its texts."""

from __future__ import annotations

import pytest
import torch

from lib.engine import engine_for, run
from lib.models import hf_model, ours
from minillm import kernels
from minillm.bench.speculate import COUNTED, let_count
from minillm.params import SamplingParams


def test_weights_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cpu, "packed_linear", lambda *_: None)  # weights as they lie on a GPU
    model = ours(hf_model())
    assert let_count(model)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [answer] = run(engine_for(model), [([40, 70, 41, 3, 50], params)])
    assert answer.outputs[0].token_ids == list(range(51, 71))


def test_a_head_that_is_the_embedding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cpu, "packed_linear", lambda *_: None)
    model = ours(hf_model(tie_word_embeddings=True))
    assert isinstance(model.embedding, torch.Tensor)
    before = model.embedding.clone()
    assert not let_count(model)
    assert torch.equal(model.embedding, before)


def test_texts_that_are_counted() -> None:
    for [text] in COUNTED.values():
        assert text[0] == text[-1] + 1
        assert len(text) > 150
    quote, edit, names = (text for [text] in COUNTED.values())
    assert quote == (*range(5000, 5200), 4999)
    assert [a for a, b in zip(quote, edit, strict=True) if a != b] == [5039, 5079, 5119, 5159, 5199]
    assert names[:14] == (*range(5000, 5012), 25000, 5015)
