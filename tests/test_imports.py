"""The order of the packages: each imports only packages before it. And ``--help`` imports nothing heavy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from lib.layers import LAYERS, PACKAGES, ROOT, sources

CACHE_MAY_NOT = {"torch", "numpy"}
OPTIONAL = {"llama_cpp": "llama-cpp-python"}  # modules of distributions that no environment needs

PACKAGES_BY_LAYER = [layer.split() for layer in LAYERS.strip().splitlines()]


@cache
def imported(path: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found.add(node.module or "")
            if node.module in ("minillm", *(f"minillm.{package}" for package in PACKAGES)):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def package_of(module: str) -> str | None:
    """The package of a module of ours: None for ``minillm`` itself and for other projects' modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "minillm" and len(parts) > 1 else None


def files_of_packages() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "minillm").rglob("*.py")):
        parts = path.relative_to(ROOT / "minillm").parts
        yield parts[0].removesuffix(".py"), path
    for package in ("kernels", "ui"):
        yield from ((package, path) for path in sources(package))


def test_no_test_module_imports_another() -> None:
    """Shared helpers are in `lib`: a test module can then be moved, renamed and run alone."""
    found = {(path.name, module) for path in sources("tests") for module in imported(path)}
    assert sorted((name, module) for name, module in found if module.partition(".")[0].startswith("test_")) == []


def test_every_package_has_its_layer() -> None:
    packages = {package for package, _ in files_of_packages()} - {"__init__", "__main__"}
    assert packages == {package for layer in PACKAGES_BY_LAYER for package in layer}


def test_a_package_imports_only_lower_layers() -> None:
    """Imports under TYPE_CHECKING count too: a name that is only needed for a type still ties two packages together."""
    layer_of = {package: number for number, layer in enumerate(PACKAGES_BY_LAYER) for package in layer}
    for package, path in files_of_packages():
        if package in ("__init__", "__main__"):
            continue
        for module in imported(path):
            other = package_of(module)
            if other is not None and other != package:
                assert layer_of[other] < layer_of[package], f"{path.relative_to(ROOT)} imports {module}"


def test_only_the_bench_command_imports_benchmarks() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for package, path in files_of_packages()
        if package != "bench" and any(module.startswith("minillm.bench") for module in imported(path))
    }
    assert importing == {"minillm/cli/bench.py"}


def test_no_files_of_a_package_import_each_other_in_a_circle() -> None:
    modules = {}
    for package, path in files_of_packages():
        name = ".".join(
            ("minillm", *path.relative_to(ROOT / ("" if package in ("kernels", "ui") else "minillm")).parts)
        )
        modules[name.removesuffix(".py").removesuffix(".__init__")] = imported(path)
    # A file's own packages are not arrows: ``from minillm.kernels import cpu`` inside kernels means the file.
    arrows = {
        name: {each for each in found if each in modules and not f"{name}.".startswith(f"{each}.")}
        for name, found in modules.items()
        if name != "minillm"
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for each in arrows.get(name, ()):
                visit(each, (*way, name))
            done.add(name)

    for name in arrows:
        visit(name, ())


def test_the_caches_books_know_no_tensor() -> None:
    for path in (ROOT / "minillm" / "cache").glob("*.py"):
        assert not CACHE_MAY_NOT & {module.split(".")[0] for module in imported(path)}, path


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_unpickled_or_evaluated(package: str) -> None:
    for path in sources(package):
        assert not {"pickle", "marshal", "shelve", "dill"} & imported(path), path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr != "load", f"{path}:{node.lineno}"


def python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**environment, "PATH": "/usr/bin"}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = """
import contextlib, io, sys
from minillm.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["generate", "--help"])
heavy = ("torch", "numpy", "tokenizers", "textual", "jinja2", "triton", "huggingface_hub", "msgspec")
print([m for m in heavy if m in sys.modules])
"""
    assert python(code).strip() == "[]"


def declared(*requirements: str) -> set[str]:
    """The names of distributions that these requirements ask for."""
    return {re.split(r"[\s;<>=!~\[]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def distributions(paths: Iterable[Path]) -> set[str]:
    """The distributions that these files import from, without the standard library and our own files."""
    owners = {**packages_distributions(), **{module: [name] for module, name in OPTIONAL.items()}}
    modules = {module.split(".")[0] for path in paths for module in imported(path)}
    ours = {"minillm", "lib", "__future__", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
    missing = {module for module in modules - sys.stdlib_module_names - ours if module not in owners}
    assert not missing, f"no distribution is installed for {missing}"
    return {owners[module][0].lower().replace("_", "-") for module in modules - sys.stdlib_module_names - ours}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: declared(*each) for name, each in project["optional-dependencies"].items()}
    runtime, dev, serve = declared(*project["dependencies"]), extras["dev"], extras["serve"]
    assert extras["peers"] == {OPTIONAL["llama_cpp"]}
    files = list(files_of_packages())
    assert distributions(path for package, path in files if package not in ("bench", "server", "ray")) == runtime
    assert distributions([ROOT / "minillm" / "ray.py"]) - runtime == extras["ray"] == {"ray"}
    # uvicorn imports httptools for us.
    assert distributions(path for package, path in files if package == "server") - runtime == serve - {"httptools"}
    peers = set(OPTIONAL.values())  # they are measured beside it
    assert distributions((ROOT / "minillm" / "bench").rglob("*.py")) <= runtime | dev | serve | peers
    assert distributions((ROOT / "tests").rglob("*.py")) <= runtime | dev | serve
