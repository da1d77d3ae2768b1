"""Run ``minillm`` by torchrun."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from minillm import LLM, SamplingParams


def torchrun(program: str, arguments: Iterable[str]) -> list[str]:
    """Return a command that starts ``program`` twice, see `lib.programs.warm`."""
    options = ["--standalone", "--nproc-per-node", "2", "--no-python"]
    return [sys.executable, "-m", "torch.distributed.run", *options, program, *arguments]


def of_two_ranks(model: Path) -> tuple[list[str], str]:
    """Return arguments that complete a prompt with two ranks of ``model``, and the output of one rank."""
    llm = LLM(str(model), device="cpu", num_blocks=64)
    [expected] = llm.generate("one two", SamplingParams(temperature=0, max_tokens=9))
    arguments = ["generate", "one two", "--model", str(model), "--device", "cpu", "--num-blocks", "64"]
    arguments += ["--temperature", "0", "--max-tokens", "9", "--tensor-parallel-size", "2"]
    return arguments, expected.outputs[0].text + "\n"
