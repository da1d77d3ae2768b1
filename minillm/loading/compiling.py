"""Load compiled layers for a model on a CPU (`minillm.model.one_token`). Compile them if the cache does not have them.

A separate process compiles, so that its memory of some hundred megabytes is freed afterwards. The cache has one library
file for each combination of layer shape, kind of processor, torch version, and source code of the layer.
"""

import hashlib
import inspect
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from minillm.model import one_token
from minillm.model.llama import Llama
from minillm.model.one_token import CompiledLlama, LayerShape, OneToken
from minillm.progress import OnMessage, OnProgress, Progress
from minillm.system import cache_dir, processor, processor_features
from minillm.text.reading import read_bytes
from minillm.weights.files import sha256_of

_LONGEST = 300  # time limit for the compilation in seconds
_SCRATCH = "minillm-"  # prefix of temporary directories


def with_compiled_layers(model: Llama, on_progress: OnProgress, on_message: OnMessage) -> Llama:
    """Return the model with its layers compiled for a single token, or report why they cannot be compiled.

    Only layers with 4-bit matrices are compiled. Other models are returned unchanged, without a message. On a machine
    with a GPU, every model is returned unchanged, because torch 2.11 crashed there while it loaded such a library.
    """
    shape = one_token.layer_shape(model)
    if shape is None or torch.cuda.is_available():
        return model
    path = _path(shape)
    if not _is_whole(path):
        problem = _compile(shape, path, on_progress)
        if problem is not None:
            on_message(
                f"{problem}: a single sequence decodes at two thirds of the speed (enforce_eager hides this message)"
            )
            return model
    try:
        return CompiledLlama.of(model, OneToken.load(path, model))
    except RuntimeError as error:
        for each in (path, _checksum(path)):
            _remove(each)
        on_message(f"{path} cannot be read and is removed; the next start compiles it again ({_last_line(str(error))})")
        return model


def compiler() -> str | None:
    """Return the path of the C++ compiler that torch would call, or None."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def _path(shape: LayerShape) -> Path:
    facts = [torch.__version__, processor(), processor_features(), inspect.getsource(one_token), asdict(shape)]
    digest = hashlib.sha256(json.dumps(facts, default=list).encode()).hexdigest()
    return cache_dir() / "compiled" / f"layer-{digest[:32]}.pt2"


def _checksum(path: Path) -> Path:
    """Return the path of the file that has a library's SHA-256.

    A library is compared with its hash before it is loaded, because a damaged library could crash the process or
    compute nonsense.
    """
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    """Return whether a library exists and matches its checksum. Only regular files are opened, no pipes or links."""
    try:
        if not all(stat.S_ISREG(each.lstat().st_mode) for each in (path, _checksum(path))):
            return False
        return sha256_of(path) == read_bytes(_checksum(path), 100).decode("ascii")
    except (OSError, ValueError):
        return False


def _remove(path: Path) -> None:
    """Remove a file, a link or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _compile(shape: LayerShape, path: Path, on_progress: OnProgress) -> str | None:
    """Compile a layer to the library ``path``, unless another process compiles it meanwhile.

    Return None on success, else a description of the problem.
    """
    if compiler() is None:
        return "no C++ compiler (g++) was found to compile the layers"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / "compiling.lock", timeout=2 * _LONGEST):
            if _is_whole(path):  # another process has just compiled it
                return None
            for rest in path.parent.glob(f"{_SCRATCH}*"):  # left by a process that was killed
                _remove(rest)
            return _compile_here(shape, path, on_progress)
    except (subprocess.TimeoutExpired, Timeout):
        return f"the layers are not compiled after {_LONGEST} s"
    except OSError as error:
        return f"the layers cannot be compiled ({error.strerror})"


def _compile_here(shape: LayerShape, path: Path, on_progress: OnProgress) -> str | None:
    label = "compiling a layer for this processor, once"
    on_progress(Progress(label, 0, 1, "layers"))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH, ignore_cleanup_errors=True) as scratch:
        part = Path(scratch, path.name)
        done = subprocess.run(
            [sys.executable, "-m", "minillm.loading.compiling_process"],
            input=json.dumps({"shape": asdict(shape), "path": str(part)}),
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": scratch, "TMPDIR": scratch, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST,
            start_new_session=True,  # it ends its own process group if this process dies
        )
        if done.returncode or not part.exists():
            return f"the layers cannot be compiled ({_last_line(done.stderr) or f'exit code {done.returncode}'})"
        for each in (path, _checksum(path)):
            _remove(each)
        _checksum(part).write_text(sha256_of(part), encoding="ascii")
        os.replace(_checksum(part), _checksum(path))
        os.replace(part, path)
    on_progress(Progress(label, 1, 1, "layers"))
    return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else ""
