"""Write the help of every command into docs/cli.md: ``python tests/write_help.py``. A test compares the page."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from unittest.mock import patch

from minillm.cli.help import help_text
from minillm.cli.main import command_parser
from minillm.cli.options import Parser

PAGE = Path(__file__).resolve().parents[1] / "docs/cli.md"
BEGIN, END = "<!-- written by tests/write_help.py -->\n", "<!-- end -->\n"


@patch.dict(os.environ, {"COLUMNS": "100"})
def sections() -> str:
    """Return the help of the top level and of every command, then all options of the commands that show a part."""
    top = command_parser()
    [commands] = [each for each in top.filled()._actions if isinstance(each, argparse._SubParsersAction)]
    parsers: list[Parser] = list({id(each): each for each in commands.choices.values()}.values())
    texts = [f"```text\n{top.format_help()}```\n"]
    texts += [f"### {each.prog}\n\n```text\n{each.format_help()}```\n" for each in parsers]
    for each in parsers:
        if each.essential and not each.prog.endswith((" run", " chat")):  # whose options are all those of generate
            texts.append(f"### {each.prog} --help-all\n\n```text\n{help_text(each, ())}```\n")
    return "\n" + "\n".join(texts) + "\n"


def page(text: str) -> str:
    """Return the text of the page with the help between its markers."""
    return re.sub(f"(?s)(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: sections(), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
