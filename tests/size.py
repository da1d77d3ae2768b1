"""Print how many lines the code has: `make size`. With ``BASE=COMMIT``, also print the change since that commit."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator

from lib.layers import PACKAGES, ROOT, sources


def first_chapter() -> list[str]:
    """Return the lines of the files of chapter 1 in docs/architecture.md, without blank lines."""
    chapter = (ROOT / "docs/architecture.md").read_text().partition("**1. One sampled request**")[2]
    files = re.findall(r"^\| \[`.*?\]\(\.\./(.*?)\)", chapter.partition("**2.")[0], re.MULTILINE)
    assert len(files) == 15
    return [line for file in files for line in (ROOT / file).read_text().splitlines() if line.strip()]


def _texts(commit: str | None) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each Python file, of the working tree or of a commit."""
    folders = (*PACKAGES, "tests")
    if not commit:
        for path in (path for folder in folders for path in sources(folder)):
            yield str(path.relative_to(ROOT)), path.read_text()
        return
    command = ["git", "-C", str(ROOT), "archive", commit, *folders]
    data = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name, file.read().decode()


def _lines(commit: str | None) -> Counter[str]:
    """Count the lines of each folder, and of production and tests."""
    lines: Counter[str] = Counter()
    for path, text in _texts(commit):
        parts, count = path.split("/"), len(text.splitlines())
        lines["/".join(parts[: min(2, len(parts) - 1)])] += count
        lines["tests, sum" if parts[0] == "tests" else "production, sum"] += count
    return lines


def main(base: str | None = None) -> None:
    """Print a line for each folder and sum, and the length of chapter 1. With ``base``, also the changes since."""
    now, before = _lines(None), _lines(base) if base else Counter[str]()
    for name in sorted(now | before, key=lambda name: ("sum" in name, name)):
        change = f"{now[name] - before[name]:+9,}" if base else ""
        print(f"{now[name]:8,}{change}  {name}")
    print(f"{len(first_chapter()):8,}{' ' * 9 if base else ''}  chapter 1, without blank lines")


if __name__ == "__main__":
    main(*sys.argv[1:])
