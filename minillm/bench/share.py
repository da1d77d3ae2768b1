"""``share``: requests that the replicas which torchrun has started share, as `minillm generate --data-parallel` does.

The requests are those of ``throughput``, ``num_requests`` for each replica: with twice the replicas there is twice the
work, and at best it takes as long. Each replica computes 32 requests first, to warm up.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from minillm.bench.registry import ScaleOptions, Subject, Workload
from minillm.bench.table import Column
from minillm.bench.workloads import throughput
from minillm.checks import integer
from minillm.errors import MinillmError
from minillm.parallel.shared_work import Replicas, SharedQueue

if TYPE_CHECKING:
    from minillm.llm import LLM

_WARM_UP = 32


@dataclass(frozen=True)
class ShareOptions(ScaleOptions):
    num_requests: int = integer(256, 1, 1 << 24, help="for each replica")


@dataclass(frozen=True)
class ShareResult:
    """All replicas together."""

    num_replicas: int
    num_requests: int
    output_tokens: int
    seconds: float  # from when all are ready to when the last has finished
    rate: float  # tokens per second

    COLUMNS: ClassVar = (
        Column("requests", lambda r: r.num_requests, ","),
        Column("replicas", lambda r: r.num_replicas, ","),
        Column("tokens per second", lambda r: r.rate, ",.0f"),
        Column("output tokens", lambda r: r.output_tokens, ","),
        Column("seconds", lambda r: r.seconds, ".2f"),
    )


def measure(subject: Subject, options: ShareOptions) -> ShareResult | None:
    """Measure all replicas; what comes of it is known to the first one, and None to the others.

    Raises:
        MinillmError: the first node has died, and with it the store of torchrun.
    """
    from torch.distributed import DistError

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


WORKLOADS = {"share": Workload(ShareOptions, measure)}
