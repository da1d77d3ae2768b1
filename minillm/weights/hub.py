"""Download models from the Hugging Face hub.

The hub client handles metadata, access tokens and transfers. minillm writes the files itself, because the client drops
partial files when it is interrupted. Files in the client's own cache are linked instead of downloaded.
"""

import hashlib
import io
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from minillm.errors import DownloadError, WeightsError, nearest
from minillm.progress import OnProgress, Progress, size, tqdm_class
from minillm.text.reading import Values
from minillm.text.safe import clean_line, parse_json
from minillm.weights.accepted import ADAPTER_CONFIG, read_config
from minillm.weights.files import FileRecord, check_space, sha256_of
from minillm.weights.gguf_header import read_start
from minillm.weights.manifest import HubSource

_PROBE_SECONDS = 2.0
_MAX_SMALL = 64 << 20  # size limit in bytes for a configuration or a tokenizer
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"\w[\w.+-]{0,199}\.safetensors", re.ASCII)
_COMMIT = re.compile(r"[\w.-]{1,100}", re.ASCII)
_SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", _INDEX),
)


@dataclass(frozen=True)
class HubFile:
    """One file of a repository at one commit. ``sha256`` is known for large files, ``git_sha1`` for all."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


def reachable(endpoint: str, seconds: float = _PROBE_SECONDS) -> bool:
    """Return whether a connection to the hub, or to the configured proxy, can be opened within ``seconds``.

    Without a network, the hub client itself would retry for 24 seconds. Raises ValueError if the endpoint or the proxy
    is not an address.
    """
    url = urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    if not url.hostname:
        raise ValueError(f"{url.geturl()!r} is not an address")
    address = (url.hostname, url.port or (80 if url.scheme == "http" else 443))
    answered = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError):  # ValueError: not a valid host name
            socket.create_connection(address, timeout=seconds).close()
            answered.set()

    # In a thread, because the system's resolver has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def download(source: HubSource, partial: Path, on_progress: OnProgress) -> tuple[list[FileRecord], str]:
    """Download a model's files into ``partial``, resuming an earlier attempt. Return their records and the commit.

    Raises:
        DownloadError: no network, no such repository, no permission, no space, or a wrong checksum.
        WeightsError: the model is not supported.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils.logging import set_verbosity_error  # its import sets the level of warnings

        if constants.HF_HUB_OFFLINE:
            raise DownloadError("the hub client is set to offline (HF_HUB_OFFLINE)")
        if not reachable(constants.ENDPOINT):
            raise DownloadError(f"no connection to {clean_line(urlsplit(constants.ENDPOINT).hostname or '', 80)}")
    except ValueError as error:
        raise DownloadError(f"the hub client's environment (HTTPS_PROXY, HF_ENDPOINT, …) is wrong: {error}") from None
    set_verbosity_error()
    with _hub_errors(source):
        info = huggingface_hub.HfApi().model_info(source.hub, revision=source.revision, files_metadata=True, timeout=10)
        if not _COMMIT.fullmatch(commit := str(info.sha)):
            raise ValueError("the name of the commit")
        files = {str(each.rfilename): _listed(each) for each in info.siblings or []}
    _forget_other_commit(partial, commit)
    if source.file:
        if source.file not in files:
            raise DownloadError(f"{source.hub} has no file {source.file} at {source.revision}{_others(source, files)}")
        records, weights = [], [source.file]
    else:
        for name in ("config.json", "tokenizer.json"):
            if name not in files:
                kind = "a LoRA adapter" if ADAPTER_CONFIG in files else "not a model that minillm can load"
                raise DownloadError(f"{source.hub} has no {name}: it is {kind}{_others(source, files)}")
        small = [files[name] for name in _SMALL_FILES if name in files]
        for file in small:
            if file.size > _MAX_SMALL:
                raise DownloadError(f"{source.hub}: {file.name} of {size(file.size)} is no file of a model")
        records = [_fetch(source, commit, file, partial, on_progress) for file in small]
        _check_config(source, partial)
        weights = _weight_files(files, partial)
    missing = sum(files[name].size for name in weights) - sum(
        path.stat().st_size for path in partial.iterdir() if path.name.removesuffix(".part") in weights
    )
    check_space(missing, partial)
    records += [_fetch(source, commit, files[name], partial, on_progress) for name in weights]
    return records, commit


def _listed(sibling: Any) -> HubFile:
    """Convert an entry of the hub's file list. Raises ValueError if its size is invalid."""
    if type(sibling.size) is not int or not 0 <= sibling.size < 1 << 50:
        raise ValueError(f"a size of {sibling.size}")
    return HubFile(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else None, sibling.blob_id)


def _check_config(source: HubSource, partial: Path) -> None:
    """Raise WeightsError if the model's configuration is not supported."""
    try:
        read_config(partial)
    except WeightsError as error:
        raise WeightsError(f"{source.hub} cannot be loaded, so its weights are not fetched: {error}") from None


def _others(source: HubSource, files: dict[str, HubFile]) -> str:
    """Describe the ``.gguf`` files of a repository, for an error message."""
    found = [name for name in sorted(files) if name.endswith(".gguf")]
    close = nearest(source.file, found) or next(iter(found), "")
    if not found:
        return ""
    return f"; it has {len(found)} .gguf file{'s' if len(found) > 1 else ''}, {clean_line(close, 100)} among them"


def _weight_files(files: dict[str, HubFile], partial: Path) -> list[str]:
    """Return the names of a repository's safetensors files: the shards in the index, or the single file."""
    if _INDEX in files:
        try:
            shards = set(parse_json((partial / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DownloadError(f"{_INDEX} of the repository is damaged") from None
        for shard in shards:
            if not isinstance(shard, str) or not _SHARD.fullmatch(shard) or shard not in files:
                raise DownloadError(f"{_INDEX} names {clean_line(str(shard))!r}, which the repository does not have")
        return sorted(shards)
    if "model.safetensors" in files:
        return ["model.safetensors"]
    raise DownloadError("the repository has no safetensors weights; minillm loads no pickled ones (.bin, .pt)")


def _forget_other_commit(partial: Path, commit: str) -> None:
    """Delete the files of an earlier, interrupted download if they are of another commit. Store ``commit`` in
    ``partial``.
    """
    note = partial / "commit"
    if not note.exists() or note.read_text() != commit:
        for path in partial.iterdir():
            if path.is_file():
                path.unlink()
        note.write_text(commit)


def _fetch(source: HubSource, commit: str, file: HubFile, partial: Path, on_progress: OnProgress) -> FileRecord:
    """Download one file and verify its checksum, unless an earlier attempt has finished it. Return its record."""
    target = partial / file.name
    if not target.exists():
        part = partial / f"{file.name}.part"
        if not _link_from_hub_cache(source, commit, file, part, on_progress):
            _transfer(source, commit, file, part, on_progress)
            _check(file, part, on_progress)
        part.replace(target)
    return FileRecord(file.name, target.stat().st_size, file.sha256 or sha256_of(target))


def _link_from_hub_cache(source: HubSource, commit: str, file: HubFile, part: Path, on_progress: OnProgress) -> bool:
    """Hard-link a file from the hub client's cache to ``part``, which saves the download.

    Return False if the cache does not have the file, or a damaged one, or if linking fails.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.hub, file.name, revision=commit)
    if not isinstance(found, str) or os.path.getsize(found) != file.size:
        return False
    part.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(found), part)
        _check(file, part, on_progress)
    except (OSError, DownloadError):
        return False
    return True


class _PartFile(io.BufferedWriter):
    """The file of an unfinished download, opened for appending.

    It rejects bytes beyond the size that the hub announced. After its first bytes, it also rejects a ``.gguf`` file
    with an unsupported architecture.
    """

    def __init__(self, source: HubSource, file: HubFile, part: Path) -> None:
        super().__init__(io.FileIO(part, "ab"))
        self._source, self._file, self._part = source, file, part
        self._is_checked = not file.name.endswith(".gguf")

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._file.size:
            raise DownloadError(
                f"{self._file.name}: received more than the {self._file.size:,} bytes that the hub announced"
            )
        written = super().write(data)
        if not self._is_checked:
            self._is_checked = True
            self.flush()
            self._check_architecture()
        return written

    def _check_architecture(self) -> None:
        """Raise WeightsError if the start of a ``.gguf`` file names an unsupported architecture."""
        from minillm.weights.gguf_file import check_architecture  # not at the top: it imports torch

        metadata = read_start(self._part)
        if "general.architecture" in metadata:
            where = f"{self._source.hub}, {self._file.name}"
            check_architecture(Values(where, metadata))


def _transfer(source: HubSource, commit: str, file: HubFile, part: Path, on_progress: OnProgress) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    class Reporter(tqdm_class()):  # type: ignore[misc]
        """A progress bar of the hub client that prints nothing and calls ``on_progress`` instead."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            on_progress(Progress(f"downloading {file.name}", int(self.n), file.size))

    url = hf_hub_url(source.hub, file.name, revision=commit)
    if part.exists() and part.stat().st_size > file.size:
        part.unlink()
    with _PartFile(source, file, part) as stream, _hub_errors(source):
        done, headers = stream.tell(), build_hf_headers()
        try:
            http_get(url, stream, resume_size=done, headers=headers, expected_size=file.size, tqdm_class=Reporter)
        except OSError as error:
            stream.flush()
            if error.errno is not None and error.strerror:
                raise DownloadError(f"cannot write {part}: {error.strerror}") from None
            raise


def _check(file: HubFile, part: Path, on_progress: OnProgress) -> None:
    """Compare a downloaded file with the hub's checksum. If it differs, delete the file and raise DownloadError."""
    if file.sha256 is not None:
        expected, found = file.sha256, sha256_of(part, on_progress)
    elif file.git_sha1 is not None:
        data = part.read_bytes()
        expected, found = file.git_sha1, hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    else:
        expected, found = str(file.size), str(part.stat().st_size)
    if expected != found:
        part.unlink()
        raise DownloadError(f"{file.name}: checksum is {found}, the hub says {expected}; run the command again")


@contextmanager
def _hub_errors(source: HubSource) -> Iterator[None]:
    """Turn each error of the hub client into a DownloadError of one line."""
    try:
        yield
    except (DownloadError, WeightsError):
        raise
    except Exception as error:
        raise DownloadError(_explained(error, source)) from None


def _explained(error: Exception, source: HubSource) -> str:
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        page = f"{constants.ENDPOINT}/{source.hub}"
        return f"{source.hub} is gated: accept its license at {page}, then log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{source.hub} has no revision {source.revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return f"{source.hub} does not exist, or is private: check the name, or log in with `hf auth login`"
    if isinstance(error, (ValueError, KeyError, TypeError)):
        return f"the server at {urlsplit(constants.ENDPOINT).hostname} is not the hub (a network's login page?)"
    reason = clean_line(str(error).split("\n")[0], 160) or type(error).__name__
    return f"{source.hub}: {reason}; run the command again to continue"
