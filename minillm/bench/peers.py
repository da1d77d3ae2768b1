"""Other engines on the same weights' shape and the same prompts, for comparison in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minillm.errors import UsageError
from minillm.llm import LLM


@dataclass(frozen=True)
class Timing:
    """One run of an engine, in seconds."""

    first_token: float  # from the request to the first token
    total: float


def transformers_peer(llm: LLM, prompts: list[list[int]]) -> tuple[Callable[[int], Timing], str]:
    """Hugging Face transformers' ``generate`` with random weights in the shape of ``llm``.

    Returns:
        A function that generates so many tokens for ``prompts``, and the peer's name.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError("--peer transformers needs the package transformers; pip install transformers") from None
    model = llm.engine.runner.model
    c = model.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
    )
    with torch.device(model.device):
        theirs: Any = transformers.LlamaForCausalLM(config).to(model.dtype).eval()
    inputs = torch.tensor(prompts, device=model.device)
    mask = torch.ones_like(inputs)

    def generate(count: int) -> None:
        theirs.generate(
            inputs, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )

    def run(output_len: int) -> Timing:
        began = time.perf_counter()
        generate(1)
        first = time.perf_counter() - began
        began = time.perf_counter()
        generate(output_len)
        return Timing(first, time.perf_counter() - began)

    return run, f"transformers {transformers.__version__}"


PEERS = {"transformers": transformers_peer}
