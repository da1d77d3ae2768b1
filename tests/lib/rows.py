"""Files of prompts, and the answers to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def requests_file(directory: Path, count: int, max_tokens: int) -> Path:
    path = directory / "in.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": f"number {i}", "id": f"line {i}", "max_tokens": max_tokens} for i in range(count)
    ]
    lines[3]["prompt"] = [9999]  # refused: not in the vocabulary
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(model: Path, source: Path, output: Path, *, batch: int = 2) -> list[str]:
    return [
        "generate", "-f", str(source), "-o", str(output), "--model", str(model), "--device", "cpu",
        "--num-blocks", str(32 * batch), "--max-num-seqs", str(batch), "--temperature", "0", "--ignore-eos", "--quiet",
    ]  # fmt: skip


def answers(path: Path) -> list[tuple[int, str, list[list[int]], str | None]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(v["index"], v["request_id"], [o["token_ids"] for o in v["outputs"]], v["error"]) for v in lines]
