"""Choose the directory for compiled kernels. Each version of Triton and of this project's kernels has its own.

Directories that no process has used for a day are removed, except for the two that were used last.
"""

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from minillm import kernels
from minillm.progress import OnMessage
from minillm.system import cache_dir

_VARIABLE = "TRITON_CACHE_DIR"
_KEPT = 2
_UNUSED = 24 * 3600  # seconds
_MARK = "used"  # the file that is touched at each start


def use_kernel_cache(on_message: OnMessage) -> bool:
    """Choose Triton's cache directory for this process and its children, unless ``$TRITON_CACHE_DIR`` is set.

    If the directory cannot be written, report this, and use a temporary directory until the process ends. Return
    whether the directory contains compiled kernels.
    """
    chosen = os.environ.get(_VARIABLE)
    path = Path(chosen) if chosen else cache_dir() / "kernels" / _name()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / _MARK).touch()
        if not chosen:
            _remove_unused(path)
    except OSError as error:
        on_message(f"{path} cannot be written ({error.strerror}): kernels are compiled again at every start")
        path = Path(tempfile.mkdtemp(prefix="minillm-kernels-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.environ[_VARIABLE] = str(path)
    return any(each.is_dir() for each in path.iterdir())


@functools.cache
def _name() -> str:
    files = sorted(Path(kernels.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return f"triton{version('triton')}-{digest[:16]}"


def _remove_unused(path: Path) -> None:
    def used(directory: Path) -> float:
        mark = directory / _MARK
        return mark.stat().st_mtime if mark.exists() else 0.0

    others = sorted((each for each in path.parent.iterdir() if each != path), key=used, reverse=True)
    for each in others[_KEPT - 1 :]:
        if time.time() - used(each) > _UNUSED:
            shutil.rmtree(each, ignore_errors=True)
