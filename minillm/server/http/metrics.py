"""Metrics for Prometheus, https://prometheus.io/docs/instrumenting/exposition_formats/."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from minillm.server.http.fair_queue import FairQueue
from minillm.service.call_messages import Figures

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)

# Metrics of an engine. If there are several engines, each has the label ``replica``.
_FIGURES: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, str], ...] = (
    (GaugeMetricFamily, "engine_requests_running", "Requests running in the engine", "num_running"),
    (GaugeMetricFamily, "engine_requests_waiting", "Requests waiting in the engine", "num_waiting"),
    (GaugeMetricFamily, "cache_blocks", "Blocks in the pool", "num_blocks"),
    (GaugeMetricFamily, "cache_blocks_used", "Blocks held by sequences", "used_blocks"),
    (GaugeMetricFamily, "cache_blocks_cached", "Free blocks in the prefix cache", "cached_blocks"),
    (CounterMetricFamily, "engine_steps", "Steps run", "num_steps"),
    (CounterMetricFamily, "engine_prefill_tokens", "Prompt tokens computed", "num_prefill_tokens"),
    (CounterMetricFamily, "engine_decoded_tokens", "Tokens decoded", "num_decoded_tokens"),
    (CounterMetricFamily, "preemptions", "Requests preempted", "num_preemptions"),
    (CounterMetricFamily, "prefix_hit_tokens", "Prompt tokens found in the prefix cache", "num_hit_tokens"),
    (CounterMetricFamily, "prefix_queried_tokens", "Prompt tokens looked up", "num_looked_up_tokens"),
    (CounterMetricFamily, "copies_on_write", "Blocks copied on write", "num_copies"),
    (GaugeMetricFamily, "disk_cache_bytes", "Bytes of all blocks on disk", "disk_bytes"),
    (CounterMetricFamily, "disk_cache_blocks_saved", "Blocks written to disk", "num_disk_saved"),
    (CounterMetricFamily, "disk_cache_blocks_read", "Blocks read from disk", "num_disk_read"),
)


class Metrics:
    """The metrics of the server, of its queue and of its engines."""

    def __init__(self, queue: FairQueue, figures: Callable[[], Sequence[Figures | None]]) -> None:
        disable_created_metrics()
        self.registry = registry = CollectorRegistry()
        about = {"registry": registry, "namespace": "minillm"}
        self.requests = Counter("http_requests", "Requests by route and status", ["route", "status"], **about)  # type: ignore[arg-type]
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of answered requests", **about)  # type: ignore[arg-type]
        self.cached_tokens = Counter("cached_tokens", "Prompt tokens of answered requests that were cached", **about)  # type: ignore[arg-type]
        self.completion_tokens = Counter("completion_tokens", "Tokens generated for clients", **about)  # type: ignore[arg-type]
        self.disconnects = Counter("disconnects", "Clients that disconnected before their answer ended", **about)  # type: ignore[arg-type]
        self.first_token = Histogram("time_to_first_token_seconds", "Time to first token", buckets=_SECONDS, **about)  # type: ignore[arg-type]
        self.whole = Histogram("request_seconds", "Duration of answered requests", buckets=_SECONDS, **about)  # type: ignore[arg-type]
        registry.register(_EngineCollector(queue, figures))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Exports the state of the queue, and the figures that the engines reported last."""

    def __init__(self, queue: FairQueue, figures: Callable[[], Sequence[Figures | None]]) -> None:
        self._queue, self._figures = queue, figures

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield _gauge("requests_queued", "Requests waiting in the server", len(self._queue.waiting))
        yield _gauge("seats_taken", "Sequences admitted to the engine", self._queue.num_taken)
        replicas = self._figures()
        label = ["replica"] if len(replicas) > 1 else []
        for kind, name, help, field in _FIGURES:
            family = kind(f"minillm_{name}", help, labels=label)
            for number, now in enumerate(replicas):
                if now is not None:
                    family.add_metric([str(number)] if label else [], getattr(now, field))
            if family.samples:
                yield family
        yield from _of_vllm([now for now in replicas if now is not None])


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"minillm_{name}", help, value)


def _of_vllm(engines: list[Figures]) -> Iterator[GaugeMetricFamily]:
    """Yield metrics under vLLM's names, which routers (llm-d, the vLLM router) read.

    Each metric is the sum over all engines.
    """
    if not engines:
        return
    used, total = sum(each.used_blocks for each in engines), sum(each.num_blocks for each in engines)
    running, waiting = sum(each.num_running for each in engines), sum(each.num_waiting for each in engines)
    yield GaugeMetricFamily("vllm:num_requests_running", "Requests that the engine computes", running)
    yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the engine's own queue", waiting)
    yield GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Blocks in use of all blocks, from 0 to 1", used / max(1, total)
    )
    sizes = {"block_size": str(engines[0].block_size), "num_gpu_blocks": str(total)}
    info = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV cache", labels=list(sizes))
    info.add_metric(list(sizes.values()), 1)
    yield info
