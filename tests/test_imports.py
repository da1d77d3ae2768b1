"""Imports go one way only: kernels <- minillm <- ui. And the command line imports nothing heavy for its help."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {"kernels": {"kernels"}, "minillm": {"kernels", "minillm"}, "ui": {"kernels", "minillm", "ui"}}
MAY_NAME_UI = ("chat.py", "demo.py", "bench.py")  # of minillm/commands: what starts the app
CACHE_MAY_NOT = {"torch", "numpy"}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found.add(node.module or "")
    return found


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for path in sources(package):
        for module in imported(path):
            top = module.split(".")[0]
            if top in ALLOWED and not (path.name in MAY_NAME_UI and path.parent.name == "commands" and top == "ui"):
                assert top in ALLOWED[package], f"{path.relative_to(ROOT)} imports {module}"


def test_the_caches_books_know_no_tensor() -> None:
    for path in (ROOT / "minillm" / "cache").glob("*.py"):
        assert not CACHE_MAY_NOT & {module.split(".")[0] for module in imported(path)}, path


@pytest.mark.parametrize("package", ALLOWED)
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
from minillm.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["generate", "--help"])
heavy = ("torch", "numpy", "tokenizers", "textual", "jinja2", "triton", "huggingface_hub")
print([m for m in heavy if m in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_the_engine_needs_neither_textual_nor_gguf_nor_triton() -> None:
    code = "import sys\nimport minillm.llm\nprint([m for m in ('textual', 'gguf', 'triton', 'ui') if m in sys.modules])"
    assert python(code).strip() == "[]"


def test_another_package_of_the_same_name_is_explained(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    result = subprocess.run(
        [sys.executable, "-m", "minillm.cli", "generate", "hi"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin", "HOME": str(tmp_path)},
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "another package named 'kernels'" in result.stderr
    assert str(tmp_path) in result.stderr
