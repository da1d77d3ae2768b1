"""``share``: requests that the replicas which torchrun has started share, as `minillm generate --data-parallel` does.

The requests are those of ``throughput``, ``num_requests`` for each replica: with twice the replicas there is twice the
work, and at best it takes as long. Each replica computes 32 requests first, to warm up.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from minillm.bench.workloads import throughput
from minillm.llm import LLM
from minillm.parallel.shared_work import Replicas, SharedQueue

_WARM_UP = 32


@dataclass(frozen=True)
class ShareResult:
    """All replicas together."""

    num_replicas: int
    num_requests: int
    output_tokens: int
    seconds: float  # from when all are ready to when the last has finished
    rate: float  # tokens per second


def measure(llm: LLM, num_requests: int, scale: float = 1.0) -> ShareResult | None:
    """Measure all replicas; what comes of it is known to the first one, and None to the others."""
    replicas = Replicas.find(llm.config.tensor_parallel_size)
    total, vocab = num_requests * replicas.count, llm.engine.runner.model.config.vocab_size
    rng = random.Random(0)
    prompts, params = zip(*throughput(rng, vocab, scale)[:_WARM_UP], strict=True)
    llm.generate(prompts, params)
    requests = [request for _ in range(-(-total // 256)) for request in throughput(rng, vocab, scale)][:total]
    llm.reset_prefix_cache()
    queue = SharedQueue(replicas, total)
    replicas.meet("ready")
    began = time.perf_counter()
    count = 0
    for _, output in llm.work_off(lambda room: [(i, *requests[i]) for i in queue.take(room)]):
        count += sum(len(completion.token_ids) for completion in output.outputs)
    replicas.store.add("tokens", count)
    replicas.arrive("done")
    if replicas.index:
        return None
    replicas.wait_for_all("done")
    seconds = time.perf_counter() - began
    count = replicas.store.add("tokens", 0)
    return ShareResult(replicas.count, total, count, seconds, count / seconds)
