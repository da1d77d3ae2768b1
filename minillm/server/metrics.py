"""Figures for Prometheus, https://prometheus.io/docs/instrumenting/exposition_formats/."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from minillm.server.messages import Figures
from minillm.server.seats import Seats

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Metrics:
    """Counts what the server does."""

    def __init__(self, seats: Seats, figures: Callable[[], Figures | None]) -> None:
        disable_created_metrics()
        self.registry = registry = CollectorRegistry()
        about = {"registry": registry, "namespace": "minillm"}
        self.requests = Counter("http_requests", "Requests by route and status", ["route", "status"], **about)  # type: ignore[arg-type]
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts that were answered", **about)  # type: ignore[arg-type]
        self.cached_tokens = Counter("cached_tokens", "Those of them that were in the cache", **about)  # type: ignore[arg-type]
        self.completion_tokens = Counter("completion_tokens", "Tokens generated for clients", **about)  # type: ignore[arg-type]
        self.disconnects = Counter("disconnects", "Clients that went away before their answer", **about)  # type: ignore[arg-type]
        self.first_token = Histogram("time_to_first_token_seconds", "Of streams", buckets=_SECONDS, **about)  # type: ignore[arg-type]
        self.whole = Histogram("request_seconds", "Of requests that were answered", buckets=_SECONDS, **about)  # type: ignore[arg-type]
        registry.register(_EngineCollector(seats, figures))

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The state of queue and engine, as it was told last."""

    def __init__(self, seats: Seats, figures: Callable[[], Figures | None]) -> None:
        self._seats, self._figures = seats, figures

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield _gauge("requests_queued", "Requests that wait for their turn", len(self._seats.waiting))
        yield _gauge("seats_taken", "Sequences in the engine's hands", self._seats.num_taken)
        now = self._figures()
        if now is None:
            return
        yield _gauge("engine_requests_running", "Requests that the engine computes", now.num_running)
        yield _gauge("engine_requests_waiting", "Requests in the engine's own queue", now.num_waiting)
        yield _gauge("cache_blocks", "Blocks of the pool", now.num_blocks)
        yield _gauge("cache_blocks_used", "Blocks that a sequence holds", now.used_blocks)
        yield _gauge("cache_blocks_cached", "Free blocks that a prompt can still find", now.cached_blocks)
        yield _count("engine_steps", "Steps computed", now.num_steps)
        yield _count("engine_prefill_tokens", "Tokens of prompts computed", now.num_prefill_tokens)
        yield _count("engine_decoded_tokens", "Tokens computed one by one", now.num_decoded_tokens)
        yield _count("preemptions", "Requests that had to give way", now.num_preemptions)
        yield _count("prefix_hit_tokens", "Prompt tokens found in the cache", now.num_hit_tokens)
        yield _count("prefix_queried_tokens", "Prompt tokens looked up", now.num_looked_up_tokens)
        yield _count("copies_on_write", "Blocks copied because another sequence holds them, too", now.num_copies)


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"minillm_{name}", help, value)


def _count(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"minillm_{name}", help, value)
