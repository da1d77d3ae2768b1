"""Compiled layers for a model on a CPU (`minillm.model.one_token`): kept from an earlier start, or compiled now.

A process of its own compiles: what that takes, some hundred megabytes, is free again afterwards. The library is kept in
a file for each shape of a layer, kind of processor, and version of torch and of the layer's source.
"""

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from minillm.model import one_token
from minillm.model.llama import Llama
from minillm.model.one_token import LayerShape, OneToken
from minillm.progress import OnMessage, OnProgress, Progress
from minillm.system import cache_dir, processor, processor_features

_LONGEST = 300  # seconds


def with_compiled_layers(model: Llama, on_progress: OnProgress, on_message: OnMessage) -> Llama:
    """The model with its layers compiled for a single token, where they can be; it says why they cannot.

    Only layers whose matrices have 4 bits are compiled; others stay as they are without a word.
    """
    shape = one_token.layer_shape(model)
    if shape is None:
        return model
    path = _path(shape)
    if not path.exists():
        problem = _compile(shape, path, on_progress)
        if problem is not None:
            on_message(f"{problem}: a single sequence decodes at two thirds of the speed (enforce_eager leaves it so)")
            return model
    try:
        return replace(model, one_token=OneToken.load(path, model))
    except RuntimeError as error:
        path.unlink(missing_ok=True)
        on_message(f"{path} cannot be read and is removed; the next start compiles it anew ({_last_line(str(error))})")
        return model


def compiler() -> str | None:
    """Where the C++ compiler is that torch would call; None without one."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def _path(shape: LayerShape) -> Path:
    facts = [torch.__version__, processor(), processor_features(), inspect.getsource(one_token), asdict(shape)]
    digest = hashlib.sha256(json.dumps(facts, default=list).encode()).hexdigest()
    return cache_dir() / "compiled" / f"layer-{digest[:32]}.pt2"


def _compile(shape: LayerShape, path: Path, on_progress: OnProgress) -> str | None:
    """Have a library written to ``path``, all at once. Returns the problem, if there is one."""
    if compiler() is None:
        return "no C++ compiler (g++) is here to compile the layers"
    label = "compiling a layer for this processor, which is kept"
    on_progress(Progress(label, 0, 1, "layers"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="minillm-") as scratch:
            part = Path(scratch, path.name)
            done = subprocess.run(
                [sys.executable, "-m", "minillm.runner.compiling_process"],
                input=json.dumps({"shape": asdict(shape), "path": str(part)}),
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": scratch, "TMPDIR": scratch, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LONGEST,
            )
            if done.returncode or not part.exists():
                return f"the layers cannot be compiled ({_last_line(done.stderr) or f'exit code {done.returncode}'})"
            os.replace(part, path)
    except subprocess.TimeoutExpired:
        return f"the layers are not compiled after {_LONGEST} s"
    except OSError as error:
        return f"the layers cannot be compiled ({error.strerror})"
    on_progress(Progress(label, 1, 1, "layers"))
    return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else ""
