"""Settings and fixtures of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from minillm import LLM

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
if not torch.cuda.is_available():
    # Before anything imports triton: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small random chat model: fast, and nonsense."""
    from support import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The real default model, float32 on the CPU."""
    from minillm import LLM

    return LLM("smollm2-135m", device="cpu", dtype="float32", num_blocks=1024)


@pytest.fixture(scope="session")
def theirs() -> Any:
    """The same weights in transformers."""
    from support import default_model_of_transformers

    return default_model_of_transformers()


@pytest.fixture
def anyio_backend() -> str:
    """What tests marked ``anyio`` run on: Textual knows no other."""
    return "asyncio"
