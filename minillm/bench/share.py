"""``share``: requests that the replicas which torchrun has started share, as `minillm generate --data-parallel` does.

The requests are those of ``throughput``, ``num_requests`` for each replica: with twice the replicas there is twice the
work, and at best it takes as long. Each replica computes 32 requests first, to warm up.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from torch.distributed import DistError

from minillm.bench.registry import ScaleOptions, Subject
from minillm.bench.table import shown
from minillm.bench.workloads import throughput
from minillm.checks import integer
from minillm.errors import MinillmError
from minillm.llm import LLM
from minillm.parallel.shared_work import Replicas

_WARM_UP = 32


@dataclass(frozen=True)
class Options(ScaleOptions):
    num_requests: int = integer(256, 1, 1 << 24, help="for each replica")


@dataclass(frozen=True)
class ShareResult:
    """All replicas together."""

    num_replicas: int = shown("replicas", ",")
    num_requests: int = shown("requests", ",")
    output_tokens: int = shown("output tokens", ",")
    seconds: float = shown("seconds", ".2f")  # from when all are ready to when the last has finished
    rate: float = shown("tokens per second", ",.0f")


def measure(subject: Subject, options: Options) -> ShareResult | None:
    """Measure all replicas; what comes of it is known to the first one, and None to the others.

    Raises:
        MinillmError: the first node has died, and with it the store of torchrun.
    """
    try:
        return _share(subject.llm, options.num_requests, options.scale)
    except DistError:
        raise MinillmError("the first node is gone, and what the others measured with it") from None


def _share(llm: LLM, num_requests: int, scale: float) -> ShareResult | None:
    replicas = Replicas.find(llm.config.tensor_parallel_size)
    total, vocab = num_requests * replicas.count, llm.engine.runner.model.config.vocab_size
    rng = random.Random(0)
    prompts, params = zip(*throughput(rng, vocab, scale)[:_WARM_UP], strict=True)
    llm.generate(prompts, params)
    requests = [request for _ in range(-(-total // 256)) for request in throughput(rng, vocab, scale)][:total]
    llm.reset_prefix_cache()
    replicas.meet("ready")
    began = time.perf_counter()
    count = 0
    for _, output in llm.work_off(lambda room: [(i, *requests[i]) for i in replicas.take(total, room)]):
        count += sum(len(completion.token_ids) for completion in output.outputs)
    replicas.store.add("tokens", count)
    replicas.arrive("done")
    if replicas.index:
        return None
    replicas.wait_for_all("done")
    seconds = time.perf_counter() - began
    count = replicas.store.add("tokens", 0)
    return ShareResult(replicas.count, total, count, seconds, count / seconds)
