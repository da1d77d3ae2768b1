"""Write docs/one-request.md, the functions that run for one request: ``python tests/write_walk.py``.

The request is sampled on a CPU, with a tiny random model and without compiled layers. A test compares the page.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/one-request.md"
MARK = "<!-- written by tests/write_walk.py -->\n"
# Each stage's outermost functions. A function belongs to the stage of its innermost caller among them.
STAGES = {
    "Arguments and tokens": ["LLM.generate"],
    "Queue": ["Engine.add"],
    "Schedule": ["Driver.step"],
    "Forward": ["Runner.run"],
    "Sample": ["Engine._decide"],
    "Output": ["Engine.note_computed", "Engine._advance", "Figures.report", "Requests.take", "Requests.output_of"],
}
STAGE_OF = {function: stage for stage, functions in STAGES.items() for function in functions}


@cache
def functions_of(file: Path) -> dict[int, ast.FunctionDef]:
    """Return a file's functions by the number of their first line, decorators included."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            found[min([node.lineno, *(each.lineno for each in node.decorator_list)])] = node
    return found


def calls_of(run: Callable[[], object]) -> dict[CodeType, str]:
    """Return our functions that ``run`` calls, with their stages, in the order of their first calls."""
    found: dict[CodeType, str] = {}

    def on_call(frame: FrameType, *_: object) -> None:
        code = frame.f_code
        if code in found or "<" in code.co_qualname or not is_ours(code.co_filename):
            return
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_qualname not in STAGE_OF:
            caller = caller.f_back
        if caller is not None:
            found[code] = STAGE_OF[caller.f_code.co_qualname]

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(before)
    return found


@cache
def is_ours(filename: str) -> bool:
    return any(Path(filename).resolve().is_relative_to(ROOT / each) for each in ("minillm", "kernels"))


def file_of(code: CodeType) -> Path:
    return Path(code.co_filename).resolve()


def sentence_of(node: ast.FunctionDef) -> str:
    """Return the first sentence of a docstring; "See `reference.f`" is replaced by the first sentence of f."""
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    if found := re.match(r"See `reference\.(\w+)`", text):
        named = {each.name: each for each in functions_of(ROOT / "kernels/reference.py").values()}
        return sentence_of(named[found[1]])
    return re.split(r"(?<! al)\.(?: |$)", text)[0].replace("|", r"\|")


def request_calls(model: Path) -> dict[CodeType, str]:
    """Return the functions of the second of two requests to a model."""
    from minillm import LLM, SamplingParams

    params = SamplingParams(temperature=0.8, max_tokens=3, seed=1, ignore_eos=True)
    with LLM(str(model), device="cpu", num_blocks=64, num_threads=1, enforce_eager=True) as llm:
        llm.generate("The capital of France is", params, use_tqdm=False)
        return calls_of(lambda: llm.generate("The capital of Spain is", params, use_tqdm=False))


def page(text: str, model: Path) -> str:
    """Return the text of the page, with a table for each stage after its mark."""
    calls, total = request_calls(model), 0
    tables = {stage: f"\n## {stage}\n\n| function | lines | what it does |\n|---|---|---|\n" for stage in STAGES}
    for code, stage in calls.items():
        file = file_of(code)
        node, name = functions_of(file)[code.co_firstlineno], file.relative_to(ROOT)
        lines = (node.end_lineno or 0) - node.lineno + 1
        total += lines
        link = f"[`{str(name).removeprefix('minillm/')}`](../{name})"
        tables[stage] += f"| {link} `{code.co_qualname}` | {lines} | {sentence_of(node)} |\n"
    count = f"{len(calls)} functions of {total:,} lines run, in {len(set(map(file_of, calls)))} files.\n"
    return text.partition(MARK)[0] + MARK + "\n" + count + "".join(tables.values())


if __name__ == "__main__":
    from lib.models import write_tiny_model

    with tempfile.TemporaryDirectory() as directory:
        written = page(PAGE.read_text(encoding="utf-8"), write_tiny_model(Path(directory)))
    PAGE.write_text(written, encoding="utf-8")
