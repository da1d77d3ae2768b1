"""minillm: a small, fast Llama inference framework.

from minillm import LLM, SamplingParams

llm = LLM("smollm2-135m")
print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.depths import DepthAnswer
    from minillm.errors import MinillmError
    from minillm.grammar.grammar import Grammar
    from minillm.llm import LLM
    from minillm.outputs import CompletionOutput, Delta, RequestOutput
    from minillm.params import BeamSearchParams, SamplingParams
    from minillm.scoring import Score

__version__ = "0.2.0"

_HOMES = {
    "minillm.llm": ("LLM",),
    "minillm.params": ("BeamSearchParams", "SamplingParams"),
    "minillm.errors": ("MinillmError",),
    "minillm.grammar.grammar": ("Grammar",),
    "minillm.outputs": ("CompletionOutput", "Delta", "RequestOutput"),
    "minillm.scoring": ("Score",),
    "minillm.depths": ("DepthAnswer",),
}
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Delta",
    "DepthAnswer",
    "Grammar",
    "MinillmError",
    "RequestOutput",
    "SamplingParams",
    "Score",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``minillm --help`` need not wait for torch."""
    for home, names in _HOMES.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, for completion in Python and in notebooks."""
    return [*__all__, "__version__"]
