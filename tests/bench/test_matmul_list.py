"""`minillm bench matmuls` on a small model."""

from __future__ import annotations

from pathlib import Path

from minillm.bench.matmuls import measure
from minillm.bench.table import ModelOptions, Subject
from minillm.llm import LLM


def test_each_weight_of_a_layer_and_the_head_are_listed(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), device="cpu", num_blocks=64)
    rows = list(measure(Subject(llm, "tiny", "matmuls"), ModelOptions()))
    c = llm.engine.runner.model.config
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    assert [(row.op, row.features, row.columns) for row in rows] == [
        ("qkv", heads, c.hidden_size),
        ("o", c.hidden_size, c.num_heads * c.head_dim),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size),
        ("down", c.hidden_size, c.intermediate_size),
        ("head", c.vocab_size, c.hidden_size),
    ]
    assert {row.kernels for row in rows} <= {"1- packed for the CPU", "1- torch"}
