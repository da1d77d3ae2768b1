"""Inside `one_layer_of_each_kind`, a forward pass computes one layer of each kind; outside, it computes all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lib.graphs import WorkGraphs
from lib.models import DEVICE, hf_model, ours
from minillm.model.kinds import one_layer_of_each_kind, to_compute
from minillm.model.llama import Batch, Layer, Llama
from minillm.runner.device.ahead import Ahead
from minillm.runner.device.graphs import Graphs
from minillm.runner.device.piecewise import PiecewiseForward
from minillm.runner.runner import Runner
from minillm.runner.step import ChunkWork

LAYERS = 6
MIXED: dict[str, Any] = {"kind": "Qwen2", "num_hidden_layers": LAYERS, "use_sliding_window": True, "sliding_window": 12}


@pytest.fixture
def projected(monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    """The layers whose q, k and v were computed, in order."""
    layers: list[Layer] = []
    project = Llama.project

    def noted(self: Llama, x: torch.Tensor, layer: Layer, out: torch.Tensor | None = None) -> torch.Tensor:
        layers.append(layer)
        return project(self, x, layer, out)

    monkeypatch.setattr(Llama, "project", noted)
    return layers


def prompt_of(model: Llama) -> tuple[Runner, Batch]:
    """Return a runner of a model, and a batch of one prompt."""
    runner = Runner(model, 8, 16)
    return runner, runner.batch([ChunkWork([5] * 20, 0, [1, 2], 20, 1)], 0)


@torch.inference_mode()
@pytest.mark.parametrize(("first_windowed", "kinds"), [(LAYERS, 1), (0, 1), (2, 2)])
def test_it_computes_as_many_layers_as_there_are_kinds(first_windowed: int, kinds: int, projected: list[Layer]) -> None:
    model = ours(hf_model(**MIXED, max_window_layers=first_windowed))
    runner, batch = prompt_of(model)
    with one_layer_of_each_kind():
        model.forward(batch, runner.kv_cache)
    assert len(projected) == len({layer.kind for layer in projected}) == kinds
    projected.clear()
    expected = model.hidden(batch, runner.kv_cache)
    assert projected == list(model.layers)
    forward = PiecewiseForward(model, runner.kv_cache, WorkGraphs(), Ahead())
    projected.clear()
    with one_layer_of_each_kind():
        next(iter(forward.shapes())).work()
    assert {layer.kind for layer in projected} == {layer.kind for layer in model.layers}
    assert len(projected) == (2 if kinds == 1 else 4), "the first layer, and the second layer of each different pair"
    assert torch.allclose(forward.hidden(batch), expected, atol=1e-4, rtol=1e-4), "later, all pieces are computed"


def test_it_ends_with_its_context_and_does_not_reach_other_threads() -> None:
    seen = []

    def look() -> None:
        seen.append(len(list(to_compute("abab", str.upper))))

    with one_layer_of_each_kind():
        with one_layer_of_each_kind():
            look()
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert seen == [2, 2, 4, 4]


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_is_rehearsed_with_one_layer(projected: list[Layer]) -> None:
    model = ours(hf_model(num_hidden_layers=LAYERS))
    runner, batch = prompt_of(model)
    expected = model.hidden(batch, runner.kv_cache)
    projected.clear()
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    result = Graphs(rows, enabled=True).run("key", lambda: model.hidden(batch, runner.kv_cache))
    assert projected == [model.layers[-1], *model.layers]
    assert torch.equal(result, expected)


@pytest.mark.gpu
@torch.inference_mode()
def test_pieces_are_rehearsed_together(projected: list[Layer]) -> None:
    model = ours(hf_model(num_hidden_layers=LAYERS))
    runner, batch = prompt_of(model)
    expected = model.hidden(batch, runner.kv_cache)
    graphs = Graphs(torch.zeros(1, dtype=torch.int32, device=DEVICE), enabled=True)
    forward = PiecewiseForward(model, runner.kv_cache, graphs, Ahead())
    projected.clear()
    assert torch.equal(forward.hidden(batch), expected)
    assert len(projected) == 2 + LAYERS, "two kinds of pieces project: the first one and all others but the last"
