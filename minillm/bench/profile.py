"""``profile``: measure the time of one decode step on a GPU, kernel by kernel, with torch's profiler."""

import random
import re
from collections import defaultdict
from dataclasses import dataclass

import torch

from minillm.bench.meter import read_bandwidth
from minillm.bench.table import ModelOptions, Subject, shown
from minillm.checks import integer
from minillm.errors import UsageError
from minillm.params import MAX_TOKENS, SamplingParams

_STEPS = 8
# Substrings that tell from a kernel's name that it computes a linear layer, or attention.
_LINEAR = ("matvec", "gemm", "nvjet", "cutlass", "splitK", "cublas")
_ATTENTION = ("paged_attention", "merge_splits")


@dataclass(frozen=True)
class Options(ModelOptions):
    batch_size: int = integer(1, 1, MAX_TOKENS, help="sequences in the batch")
    context: int = integer(512, 1, MAX_TOKENS, help="tokens per sequence")


@dataclass(frozen=True)
class KernelShare:
    """One kernel's part of a decode step.

    ``bytes`` is the number of bytes that the kernel reads. It is known for linear layers and attention, and None for
    other kernels.
    """

    kernel: str = shown("kernel", width=48)
    launches: float = shown("launches", ".1f")  # per step
    launches_per_layer: float = shown("per layer", ".2f")
    microseconds: float = shown("us", ".1f")  # per step
    bytes: int | None = shown("MB", ".0f", 1e-6)
    fraction: float | None = shown("of copy speed", ".0%")


@dataclass(frozen=True)
class Profile:
    batch_size: int = shown("sequences", ",")
    context: int = shown("tokens per sequence", ",")
    step_microseconds: float = shown("us per step", ".0f")  # from the first kernel of a step to the first of the next
    kernels: list[KernelShare]  # type: ignore[misc]  # after fields without defaults


def measure(subject: Subject, options: Options) -> Profile:
    """Profile decode steps. Raises UsageError if the model is not on a GPU, or the sequences do not fit."""
    llm, batch_size, context = subject.llm, options.batch_size, options.context
    engine, model = llm.engine, llm.engine.runner.model
    if batch_size > engine.scheduler.max_num_seqs or context + 64 > engine.max_model_len:
        raise UsageError(f"at most {engine.scheduler.max_num_seqs} sequences of {engine.max_model_len - 64} tokens")
    if model.device.type != "cuda":
        raise UsageError("bench profile needs a GPU")
    rng, c, size = random.Random(0), model.local, model.dtype.itemsize
    params = SamplingParams(temperature=0.7, max_tokens=engine.max_model_len - context, ignore_eos=True, seed=0)
    llm.reset_prefix_cache()
    for number in range(batch_size):
        engine.add_request(str(number), [rng.randrange(model.config.vocab_size) for _ in range(context)], params)
    last = engine.requests.groups[str(batch_size - 1)].sequences[0]
    while last.num_output_tokens < 8:
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            engine.step()
        torch.cuda.synchronize()
    tokens = sum(group.sequences[0].num_computed for group in engine.requests.groups.values())
    for request_id in list(engine.requests.groups):
        engine.abort(request_id)
    engine.carry_out_aborts()
    engine.take_finished()

    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    begins = sorted(event.time_range.start for event in events if "_begin_decode" in event.name)
    times = defaultdict[str, list[float]](list)
    for event in events:
        if begins[0] <= event.time_range.start < begins[-1]:
            name = re.sub(r"void |at::native::|at_cuda_detail::|[<(].*", "", event.name)[:48]
            times[name].append(event.time_range.elapsed_us())
    steps = len(begins) - 1

    def share(kernel: str, times: list[float], traffic: int | None = None) -> KernelShare:
        launches, microseconds = len(times) / steps, sum(times) / steps
        fraction = traffic / bandwidth / (microseconds * 1e-6) if traffic and microseconds else None
        return KernelShare(kernel, launches, launches / c.num_layers, microseconds, traffic, fraction)

    bandwidth = read_bandwidth(model.device)
    unread = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size  # a step reads one row of the embedding
    rows = [share(name, times[name]) for name in sorted(times, key=lambda name: -sum(times[name]))]
    for title, parts, traffic in (
        ("linear layers", _LINEAR, (c.num_parameters - unread) * size),
        ("attention", _ATTENTION, tokens * c.kv_bytes_per_token(model.kv_element_size)),
    ):
        all_times = [each for name in times if any(part in name for part in parts) for each in times[name]]
        rows.append(share(f"all {title}", all_times, traffic))
    return Profile(batch_size, tokens // batch_size, (begins[-1] - begins[0]) / steps, rows)
