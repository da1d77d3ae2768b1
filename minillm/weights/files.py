"""A model's files on this machine, and the record (``minillm.json``) that marks them as complete.

Only a model with a record counts as downloaded. The record is written last and atomically. An interrupted download
leaves a ``.partial`` directory, which the next attempt resumes.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from minillm.errors import DownloadError, UsageError, WeightsError
from minillm.progress import OnMessage, OnProgress, Progress, ignore_progress, size
from minillm.system import cache_dir
from minillm.text.reading import open_regular, read_bytes
from minillm.text.safe import clean_line, parse_json

RECORD = "minillm.json"


@dataclass(frozen=True)
class ModelFiles:
    """A model's path: a directory in Hugging Face's layout, or a ``.gguf`` file. ``source`` is where it was downloaded
    from.
    """

    name: str
    path: Path
    source: str


@dataclass(frozen=True)
class FileRecord:
    """One file of a downloaded model, with its size in bytes and its sha256 at the time of the download."""

    name: str
    size: int
    sha256: str


def models_dir() -> Path:
    return cache_dir() / "models"


def _home(name: str, ending: str = "") -> Path:
    """Return the directory of a downloaded model.

    ``org/name`` is stored as ``org--name``. A dash of the name that is next to a slash or another dash is stored as
    ``%``, which names never contain. So two names never share a directory, and `_name_of` can restore the name.
    """
    return models_dir() / (re.sub("-(?=[-/])|(?<=[-/])-", "%", name).replace("/", "--") + ending)


def _name_of(home: str) -> str:
    """Return the name of the model that is stored in the directory ``home``."""
    return home.replace("--", "/").replace("%", "-")


def downloaded() -> list[ModelFiles]:
    """Return all downloaded models, sorted by name."""
    homes = [record.parent.name for record in sorted(models_dir().glob(f"*/{RECORD}"))]
    found = [find_downloaded(_name_of(home)) for home in homes if not home.endswith(".partial")]
    return [files for files in found if files is not None]


def size_on_disk(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def find_downloaded(name: str) -> ModelFiles | None:
    """Return the downloaded model called ``name`` if all its files have their recorded sizes, else None."""
    directory = _home(name)
    try:
        source, files = _read_record(directory)
        complete = all((directory / item.name).stat().st_size == item.size for item in files)
    except (OSError, ValueError):
        return None
    return ModelFiles(name, _model_path(directory, files), source) if complete and files else None


def identity_of(files: ModelFiles) -> str:
    """Return a text that identifies a model's files. Models with different files have different texts.

    For a downloaded model, it consists of the recorded hashes. For other models, it consists of the files' sizes and
    modification times, because hashing the files would take longer than loading them.
    """
    home = _home(files.name)
    if files.path == home or files.path.parent == home:
        with suppress(OSError, ValueError):
            return "\n".join(f"{item.name} {item.sha256}" for item in _read_record(home)[1])
    paths = sorted(files.path.iterdir()) if files.path.is_dir() else [files.path]
    stats = [(path.name, path.stat()) for path in paths if path.is_file()]
    return "\n".join(f"{name} {found.st_size} {found.st_mtime_ns}" for name, found in stats)


def verify(name: str, on_progress: OnProgress) -> None:
    """Compare the sha256 of a downloaded model's files with the recorded hashes. Raises WeightsError if one differs."""
    directory = _home(name)
    try:
        _, files = _read_record(directory)
    except (OSError, ValueError):
        raise WeightsError(f"model {name} is not downloaded; run `minillm pull {name}`") from None
    for item in files:
        path = directory / item.name
        found = sha256_of(path, on_progress) if path.exists() else "no such file"
        if found != item.sha256:
            raise WeightsError(
                f"{path}: sha256 is {found}, recorded was {item.sha256}; "
                f"run `minillm rm {name}` and `minillm pull {name}`"
            )


def remove(name: str) -> int:
    """Delete a downloaded model and the remains of an interrupted download. Return the freed bytes.

    Raises:
        UsageError: no model of this name is downloaded.
        WeightsError: the model is being downloaded, cannot be deleted, or is a symbolic link.
    """
    home = _home(name)
    ours = re.compile(rf"{re.escape(home.name)}(\.partial|\.broken\d+)?")
    found = [path for path in models_dir().glob("*/") if ours.fullmatch(path.name)]
    if not found:
        # Suggests no similar name: the user might delete another model.
        raise UsageError(f"model {clean_line(name)} is not downloaded; `minillm models` lists downloaded models")
    if links := [path for path in found if path.is_symlink()]:
        raise WeightsError(f"{links[0]} is a symbolic link; delete the link and its directory yourself")
    try:
        with FileLock(_home(name, ".lock"), timeout=0):
            freed = sum(map(size_on_disk, found))
            (home / RECORD).unlink(missing_ok=True)  # from here on it counts as not downloaded
            for path in found:
                shutil.rmtree(path)
    except Timeout:
        raise WeightsError(f"another process is downloading {name}") from None
    except OSError as error:
        raise WeightsError(f"cannot delete {home}: {error.strerror or error}") from None
    return freed


def _model_path(directory: Path, files: list[FileRecord]) -> Path:
    """Return the path to load a model from: the ``.gguf`` file of a model with no other files, else its directory."""
    return directory / files[0].name if len(files) == 1 and files[0].name.endswith(".gguf") else directory


def _read_record(directory: Path) -> tuple[str, list[FileRecord]]:
    """Read a downloaded model's source and files. Raises OSError or ValueError if the record is missing or damaged."""
    record = parse_json(read_bytes(directory / RECORD))
    try:
        return str(record["source"]), [
            FileRecord(str(entry["name"]), int(entry["size"]), str(entry["sha256"])) for entry in record["files"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from None


def sha256_of(path: Path, on_progress: OnProgress = ignore_progress) -> str:
    """Return the file's sha256 in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with open_regular(path) as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            on_progress(Progress(f"checking {path.name}", done, total))
    return digest.hexdigest()


@contextmanager
def downloading(name: str, on_message: OnMessage) -> Iterator[Path]:
    """Lock a model's ``.partial`` directory for this process, and yield its path.

    The directory may contain files of an earlier, interrupted download.

    Raises DownloadError if the cache directory is not writable.
    """
    partial = _home(name, ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = FileLock(_home(name, ".lock"))
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
        partial.mkdir(parents=True, exist_ok=True)  # the previous owner of the lock may have moved it
        yield partial
    finally:
        lock.release()


def place(name: str, partial: Path, source: str, files: list[FileRecord], extra: dict[str, str]) -> ModelFiles:
    """Turn a complete ``.partial`` directory into the downloaded model, atomically. ``extra`` goes into the record."""
    record = {"source": source, **extra, "files": [asdict(item) for item in files]}
    temporary = partial / f"{RECORD}.tmp"
    temporary.write_text(json.dumps(record, indent=2), encoding="utf-8")
    temporary.replace(partial / RECORD)
    final = _home(name)
    if final.exists():  # incomplete or damaged, otherwise it would have been used
        names = (final.with_name(f"{final.name}.broken{number}") for number in count())
        os.replace(final, next(path for path in names if not path.exists()))
    os.replace(partial, final)
    return ModelFiles(name, _model_path(final, files), source)


def check_space(needed: int, directory: Path) -> None:
    """Raise DownloadError unless ``needed`` bytes are free on ``directory``'s file system."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise DownloadError(
            f"not enough disk space in {directory}: {size(needed)} are needed, {size(free)} are free; "
            "free some space, or set MINILLM_CACHE to another disk"
        )
