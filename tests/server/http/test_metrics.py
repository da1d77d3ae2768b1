"""Test the metrics that routers read."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lib.server import served
from minillm.server.http.fair_queue import FairQueue
from minillm.server.http.metrics import Metrics
from minillm.service.call_messages import Figures


def figures(running: int, waiting: int, used: int) -> Figures:
    names = list(Figures.__struct_fields__)
    values = dict.fromkeys(names, 0) | {"num_running": running, "num_waiting": waiting, "used_blocks": used}
    return Figures(**values | {"num_blocks": 40, "block_size": 16})


@pytest.mark.parametrize(
    ("engines", "expected", "sizes"),
    [
        (
            [figures(3, 2, 10)],
            {"running": 3, "waiting": 2, "usage": 0.25},
            {"block_size": "16", "num_gpu_blocks": "40"},
        ),
        (
            [figures(3, 2, 10), None, figures(1, 0, 40)],
            {"running": 4, "waiting": 2, "usage": 0.625},
            {"block_size": "16", "num_gpu_blocks": "80"},
        ),
    ],
)
def test_routers_find_load_and_cache_under_the_names_of_vllm(
    engines: list[Figures | None], expected: dict[str, float], sizes: dict[str, str]
) -> None:
    text = Metrics(FairQueue(1, 1), lambda: engines).text().decode()
    found = {each.name: each for family in text_string_to_metric_families(text) for each in family.samples}
    assert found["vllm:num_requests_running"].value == expected["running"]
    assert found["vllm:num_requests_waiting"].value == expected["waiting"]
    assert found["vllm:kv_cache_usage_perc"].value == expected["usage"]
    assert found["vllm:cache_config_info"].labels == sizes


@pytest.mark.parametrize("engines", [[], [None]])
def test_an_engine_that_has_told_nothing_has_no_figures(engines: list[Figures | None]) -> None:
    assert "vllm:" not in Metrics(FairQueue(1, 1), lambda: engines).text().decode()


def test_a_server_has_the_figures_of_its_engine_before_the_first_request(tiny_model: Path) -> None:
    with served(tiny_model, "--num-blocks", "64") as running:
        text = httpx.get(f"{running.url}/metrics", timeout=60).text
    assert "\nvllm:kv_cache_usage_perc 0.0\n" in text
    assert "\nminillm_cache_blocks 64.0\n" in text
