"""A model's files on this machine, and the record that says they are complete.

A model counts as downloaded only by its record, which is written last and atomically: whatever is interrupted before
leaves a ``.partial`` directory, from which the next attempt goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from minillm.errors import DownloadError, WeightsError
from minillm.paths import cache_dir
from minillm.progress import OnMessage, OnProgress, Progress, ignore_progress
from minillm.text.safe import clean_line, parse_json

RECORD = "minillm.json"


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies: a directory of Hugging Face's layout, or a ``.gguf`` file. ``source`` says who served it."""

    name: str
    path: Path
    source: str


@dataclass(frozen=True)
class FileRecord:
    """One file of a downloaded model. ``sha256`` was true when it was downloaded."""

    name: str
    size: int
    sha256: str


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        WeightsError: there is no such file, or no JSON object in it.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{path} is missing: a model directory has config.json, safetensors and tokenizer.json"
        ) from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: {clean_line(str(error))}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object")
    return value


def models_dir() -> Path:
    return cache_dir() / "models"


def find_downloaded(name: str) -> ModelFiles | None:
    """The downloaded model called ``name``, its files present at their recorded sizes; None otherwise."""
    directory = models_dir() / name
    try:
        record = parse_json((directory / RECORD).read_text(encoding="utf-8"))
        files = [FileRecord(**entry) for entry in record["files"]]
        complete = all((directory / item.name).stat().st_size == item.size for item in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ModelFiles(name, directory, record["source"]) if complete and files else None


def verify(name: str, on_progress: OnProgress) -> None:
    """Compare every file of a downloaded model with its recorded sha256.

    Raises:
        WeightsError: a file differs, or the model is not downloaded.
    """
    directory = models_dir() / name
    try:
        record = parse_json((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise WeightsError(f"model {name} is not downloaded; `minillm pull {name}` does that") from None
    for entry in record["files"]:
        path = directory / entry["name"]
        found = sha256_of(path, on_progress) if path.exists() else "no such file"
        if found != entry["sha256"]:
            raise WeightsError(
                f"{path}: sha256 is {found}, recorded was {entry['sha256']}; "
                f"delete {directory} and run `minillm pull {name}`"
            )


def sha256_of(path: Path, on_progress: OnProgress = ignore_progress) -> str:
    """The file's sha256 in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            on_progress(Progress(f"checking {path.name}", done, total))
    return digest.hexdigest()


@contextmanager
def downloading(name: str, on_message: OnMessage) -> Iterator[Path]:
    """A partial directory for model ``name``, held by one process at a time; it may hold what an earlier one left.

    Raises:
        DownloadError: the cache directory cannot be written.
    """
    partial = models_dir() / f"{name}.partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = FileLock(models_dir() / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_message(f"another process is downloading {name}; waiting for it")
            lock.acquire()
    except OSError as error:
        raise DownloadError(
            f"cannot write to {models_dir()}: {error.strerror}; make it writable, or set MINILLM_CACHE elsewhere"
        ) from None
    try:
        partial.mkdir(parents=True, exist_ok=True)  # whoever held the lock before may have moved it
        yield partial
    finally:
        lock.release()


def place(name: str, partial: Path, source: str, files: list[FileRecord], extra: dict[str, str]) -> ModelFiles:
    """Turn a complete partial directory into the downloaded model, atomically."""
    record = {"source": source, **extra, "files": [asdict(item) for item in files]}
    temporary = partial / f"{RECORD}.tmp"
    temporary.write_text(json.dumps(record, indent=2), encoding="utf-8")
    temporary.replace(partial / RECORD)
    final = models_dir() / name
    if final.exists():  # incomplete or damaged, else it would have been used
        os.replace(final, _unused(final))
    os.replace(partial, final)
    return ModelFiles(name, final, source)


def _unused(path: Path) -> Path:
    number = 0
    while (candidate := path.with_name(f"{path.name}.broken{number}")).exists():
        number += 1
    return candidate


def check_space(needed: int, directory: Path) -> None:
    """Raise DownloadError unless ``needed`` bytes are free where ``directory`` lies."""
    import shutil

    free = shutil.disk_usage(directory).free
    if needed > free:
        raise DownloadError(
            f"not enough disk space in {directory}: {needed:,} bytes are needed, {free:,} are free; "
            "make room or set MINILLM_CACHE to another disk"
        )
