"""Any kind of installation adds one import name, `minillm`, and works next to any other packages."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import minillm

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("kernels", "ui")  # folders of the checkout that lie below `minillm` in an environment
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a program outside the checkout, which it must not find by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(target: str, source: Path, directory: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", directory, cwd=source)
    [built] = directory.iterdir()
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def sources() -> set[str]:
    """Return the files of the packages without the pages' pictures, under their names in an environment."""
    tracked = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "minillm", *LINKS)
    found = set(tracked.split()) - {f"minillm/{name}" for name in LINKS}
    files = {name for name in found if (ROOT / name).exists() and not name.endswith(".svg")}
    return {name if name.startswith("minillm/") else f"minillm/{name}" for name in files}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files there are")
def test_a_wheel_has_all_of_minillm_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert inside == sources()
    assert {"minillm/kernels/reference.py", "minillm/ui/app.py", "minillm/weights.toml", "minillm/py.typed"} <= inside
    assert {name.split("/")[0] for name in names_in(wheel)} == {"minillm", f"minillm-{minillm.__version__}.dist-info"}


def test_a_wheel_of_the_sdist_is_the_wheel_of_the_checkout(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym()], "a link leads out of it"
        archive.extractall(tmp_path / "source", filter="data")
    [source] = (tmp_path / "source").iterdir()
    again = zipfile.ZipFile(build("wheel", source, tmp_path / "built"))
    assert set(again.namelist()) == names_in(wheel)
    for name in again.namelist():
        assert again.read(name) == zipfile.ZipFile(wheel).read(name) or name.endswith("RECORD"), name


# --- installed --------------------------------------------------------------------------------------------------------


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an empty environment, in which our dependencies can be imported, but not our own packages."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    folders = [folder for folder in sys.path if folder.endswith("site-packages")]
    (site_packages(python) / "dependencies.pth").write_text("\n".join(folders))
    return python


def site_packages(python: Path) -> Path:
    [found] = (python.parents[1] / "lib").glob("python*/site-packages")
    return found


def pip(python: Path, *arguments: object) -> None:
    run(sys.executable, "-m", "pip", "--python", python, *arguments)


def install(python: Path, *arguments: object) -> None:
    pip(python, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", *arguments)


def foreign(name: str, directory: Path) -> Path:
    """A wheel of another project, with a package that has the name of one of our folders."""
    files = {f"{name}/__init__.py": "FOREIGN = True\n", f"{name}/reference.py": "", f"{name}/app.py": ""}
    info = f"{name}-1.0.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = []
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={digest},{len(text)}\n")
        archive.writestr(f"{info}/RECORD", "".join(lines) + f"{info}/RECORD,,\n")
    return path


def check_ours(python: Path, where: Path, cwd: Path) -> None:
    """Check that `minillm` works, and that all of it comes from ``where``."""
    assert "smollm2-135m" in run(python.parent / "minillm", "models", cwd=cwd)
    code = f"""
import importlib.util, minillm
print(minillm.__version__)
for name in ("minillm", {", ".join(f'"minillm.{name}"' for name in LINKS)}, "minillm.ui.app"):
    print(importlib.util.find_spec(name).origin)
"""
    version, *files = run(python, "-c", code, cwd=cwd).split()
    assert version == minillm.__version__
    assert all(Path(file).is_relative_to(where) for file in files), files


def check_foreign(python: Path, cwd: Path) -> None:
    for name in LINKS:
        code = f"import {name}, {name}.app; print({name}.FOREIGN, {name}.__file__)"
        said, file = run(python, "-c", code, cwd=cwd).split()
        assert (said, Path(file).parent) == ("True", site_packages(python) / name)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_packages_of_the_same_names_live_side_by_side(wheel: Path, python: Path, tmp_path: Path, first: str) -> None:
    others = [foreign(name, tmp_path) for name in LINKS]
    for wheels in [[wheel], others] if first == "ours" else [others, [wheel]]:
        install(python, *wheels)
    check_ours(python, site_packages(python), tmp_path)
    check_foreign(python, tmp_path)
    if first == "ours":
        run(python, "-c", "import minillm.kernels.reference, minillm.ui.app, minillm.llm", cwd=tmp_path)
    pip(python, "uninstall", "--quiet", "--yes", *(LINKS if first == "ours" else ["minillm"]))
    if first == "ours":
        check_ours(python, site_packages(python), tmp_path)
    else:
        check_foreign(python, tmp_path)


def test_an_editable_install_gives_one_name_as_well(python: Path, tmp_path: Path) -> None:
    install(python, "--no-build-isolation", "--editable", ROOT)
    check_ours(python, ROOT, tmp_path)
    code = f"import importlib.util as u; print([name for name in {(*LINKS, 'tests')} if u.find_spec(name)])"
    assert run(python, "-c", code, cwd=tmp_path) == "[]\n"
    install(python, *(foreign(name, tmp_path) for name in LINKS))
    check_ours(python, ROOT, tmp_path)
    check_foreign(python, tmp_path)
