"""weights.toml: what is in it, and what is wrong with others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minillm.errors import UsageError
from minillm.weights.manifest import HubSource, PackageSource, PathSource, load_manifest, manifest_path

ENTRY = """
default = "m"
[models.m]
description = "d"
parameters = "1B"
license = "MIT"
size = 10
sources = [{ hub = "org/m" }]
"""


def test_the_shipped_manifest_lists_the_promised_models() -> None:
    manifest = load_manifest()
    assert manifest.default == "smollm2-135m"
    names = set(manifest.models)
    assert {
        "smollm2-135m",
        "smollm2-360m",
        "smollm2-1.7b",
        "tinyllama-1.1b-chat",
        "llama-3.2-1b",
        "llama-3.2-3b",
    } <= names
    assert {"llama-3.1-8b", "deepseek-r1-llama-8b", "mistral-7b-v0.3"} <= names
    for entry in manifest.models.values():
        assert any(isinstance(source, HubSource) for source in entry.sources)
        assert entry.gated == entry.license.startswith("Llama 3")
        for source in entry.sources:
            if isinstance(source, PackageSource):
                assert re.fullmatch(r"[0-9a-f]{64}", source.sha256)
                assert re.fullmatch(r"[0-9a-f]{64}", source.member_sha256)


def test_it_lies_at_the_top_of_the_repository() -> None:
    assert manifest_path() == Path(__file__).resolve().parents[2] / "weights.toml"


def test_paths_are_relative_to_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(ENTRY.replace('{ hub = "org/m" }', '{ path = "my model" }, { path = "~/x" }'))
    first, second = load_manifest(path).models["m"].sources
    assert first == PathSource(str(tmp_path / "my model"))
    assert second == PathSource(str(Path.home() / "x"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\ndefault = = 3", "line 2"),
        ("", "'default' is missing"),
        ('default = "m"', "'models' is missing"),
        ('default = "m"\nmodels = 3', "at least one"),
        ('default = "m"\n[models]', "at least one"),
        (ENTRY.replace('default = "m"', 'default = "x"'), "default 'x'"),
        (ENTRY.replace("license", "licence"), "unknown key 'licence'"),
        (ENTRY.replace("size = 10", ""), "'size' is missing"),
        (ENTRY.replace("size = 10", 'size = "10"'), "size must be of type int"),
        (ENTRY.replace("size = 10", "size = true"), "size must be of type int"),
        (ENTRY.replace("size = 10", "size = 10\ngated = 1"), "gated must be of type bool"),
        (ENTRY.replace('[{ hub = "org/m" }]', "[]"), "at least one"),
        (ENTRY.replace('{ hub = "org/m" }', "3"), "exactly one of the keys path, hub, package"),
        (ENTRY.replace('{ hub = "org/m" }', '{ hub = "a", path = "b" }'), "exactly one"),
        (ENTRY.replace('{ hub = "org/m" }', '{ hub = "a", revisoin = "b" }'), "unknown key 'revisoin'"),
        (ENTRY.replace('{ hub = "org/m" }', '{ package = "a" }'), "is missing"),
        (ENTRY + ENTRY.replace('default = "m"', ""), "line"),
    ],
)
def test_a_wrong_manifest_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        load_manifest(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_manifest_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        load_manifest()
