"""Measure other programs in this process, for ``minillm bench latency --peer``.

A peer is a function ``(subject, prompts) -> (run, name)``. ``run(count)`` generates ``count`` tokens for each prompt,
and returns a `Timing`. ``name`` is the program's name with its version. A peer raises UsageError if the program is not
installed or cannot run the subject.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from minillm.bench.table import Subject
from minillm.errors import UsageError

Timing = tuple[float, float]  # seconds of one run: from its start to the first tokens, and to the end
_SAME_NAMES = (  # settings with the same name in our configuration and in that of transformers
    "vocab_size", "hidden_size", "head_dim", "intermediate_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def _transformers(subject: Subject, prompts: list[list[int]]) -> tuple[Callable[[int], Timing], str]:
    """Prepare transformers' `generate`, with random weights of the subject's dimensions.

    Return (run, name). ``run`` generates a number of tokens per prompt, and returns their `Timing`.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError("--peer transformers needs the package transformers; pip install transformers") from None
    model = subject.llm.engine.runner.model
    c = model.config
    config = transformers.LlamaConfig(
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        **{name: getattr(c, name) for name in _SAME_NAMES},
    )
    with torch.device(model.device):
        theirs: Any = transformers.LlamaForCausalLM(config).to(model.dtype).eval()
    inputs = torch.tensor(prompts, device=model.device)
    given = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "pad_token_id": 0}

    def seconds(count: int) -> float:
        began = time.perf_counter()
        theirs.generate(inputs, max_new_tokens=count, min_new_tokens=count, **given)
        return time.perf_counter() - began

    return lambda output_len: (seconds(1), seconds(output_len)), f"transformers {transformers.__version__}"


def _llama_cpp(subject: Subject, prompts: list[list[int]]) -> tuple[Callable[[int], Timing], str]:
    """Prepare llama.cpp with the subject's GGUF file, kind of device and number of threads.

    Return (run, name). ``run`` computes a number of steps after the prompts, and returns their `Timing`. It only
    computes logits and samples no tokens: the input of each step is an arbitrary token.
    """
    try:
        import llama_cpp
    except ImportError:
        raise UsageError("--peer llama.cpp needs the package llama-cpp-python; pip install llama-cpp-python") from None
    if len(prompts) > 1:
        raise UsageError("--peer llama.cpp measures one sequence: leave --batch-size out")
    if not subject.name.endswith(".gguf"):
        raise UsageError("--peer llama.cpp needs a GGUF file: --model FILE.gguf")
    (prompt,), model, threads = prompts, subject.llm.engine.runner.model, torch.get_num_threads()
    theirs: Any = llama_cpp.Llama(
        subject.name,
        n_gpu_layers=0 if model.device.type == "cpu" else -1,
        n_ctx=model.config.max_position_embeddings,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def run(output_len: int) -> Timing:
        theirs.reset()
        began = time.perf_counter()
        first = 0.0
        for tokens in [prompt, *([token] for token in range(1, output_len))]:  # arbitrary tokens
            theirs.eval(tokens)
            llama_cpp.llama_synchronize(theirs.ctx)
            first = first or time.perf_counter() - began
        return first, time.perf_counter() - began

    return run, f"llama.cpp {llama_cpp.__version__}"


PEERS = {"transformers": _transformers, "llama.cpp": _llama_cpp}
