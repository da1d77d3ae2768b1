"""``@file`` in a question: find files by letters or by path, and add their text to the question."""

import itertools
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from minillm.errors import UsageError
from minillm.progress import size
from minillm.system import expanded
from minillm.text.safe import clean_line
from minillm.ui.numbers import plural

LONGEST_FILE = 64 << 10  # maximum bytes of a file in a question
_MOST_FILES, _LONGEST_WALK = 20_000, 0.3  # limits of the search: number of files, and seconds
_SKIPPED = {"node_modules", "__pycache__", "venv", "target", "dist", "build"}  # folders that are not searched
_MENTION = re.compile(r"""(?<!\S)@(?:"([^"\n]+)"|'([^'\n]+)'|((?:\\[^\n]|\S)+))""")
_FENCE = re.compile(r"^`{3,}([^`\n]+)$", re.MULTILINE)
_FENCED = re.compile(r"^(`{3,})([^`\n]+)\n(.*?)\n?^\1$", re.MULTILINE | re.DOTALL)
_DROPPED = re.compile(r"""(?<!\S)(?:'/[^'\n]+'|"/[^"\n]+"|file:///\S+)(?!\S)""")
_LONGEST_DROP = 10_000  # maximum characters of the paths of dropped files
_FILE_NAME = re.compile(r".*\.[A-Za-z]\w{0,4}|(?=.*[A-Za-z]).*/.*")  # an extension, or a path
_FENCES = re.compile(r"^ *(`{3,}|~{3,}).*?(?:^ *\1|\Z)", re.MULTILINE | re.DOTALL)
_DECORATOR = re.compile(
    r"^[ \t]*@\S.*\n(?=\s*(?:@|(?:async|def|class|function|export|public|private|protected|static)\b))", re.MULTILINE
)
_BEGUN = re.compile(r'(?<!\S)@(?:"([^"\n]*)|([^"\s]*))$')
_TRAILING = ",.;:!?)]}'"  # punctuation after a name that belongs to the sentence


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files below ``folder``, relative to it. Files of upper folders are first.

    Hidden files are left out.
    """
    found: list[str] = []
    folders, end = [""], time.monotonic() + _LONGEST_WALK
    while folders and len(found) < _MOST_FILES and time.monotonic() < end:
        deeper = []
        for each in folders:
            try:
                entries = sorted(os.scandir(folder / each), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                if entry.name.startswith(".") or entry.name in _SKIPPED:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    deeper.append(os.path.join(each, entry.name))
                elif entry.is_file():
                    found.append(os.path.join(each, entry.name))
        folders = deeper
    return found[:_MOST_FILES]


def is_path(letters: str) -> bool:
    """Return whether the typed ``letters`` begin a path (``/``, ``~/``, ``./``, ``../``) rather than the name of a
    file.
    """
    return letters.startswith(("/", "./", "../")) or (letters.startswith("~") and "/" in letters)


def matching_paths(letters: str, folder: Path) -> list[str]:
    """Return the paths that begin with ``letters``, sorted. Folders end in a slash.

    Hidden files are included only after a dot. ``folder`` is the base of relative paths.
    """
    head, _, begun = letters.rpartition("/")
    try:
        entries = list(itertools.islice(os.scandir(folder / expanded(f"{head}/", "@")), _MOST_FILES))
    except (UsageError, OSError):
        return []
    shown = [entry for entry in entries if entry.name.startswith(begun) and (begun or entry.name[0] != ".")]
    return sorted(f"{head}/{entry.name}{'/' * entry.is_dir()}" for entry in shown)


def best_matches(names: Sequence[str], letters: str, most: int) -> list[str]:
    """Return at most ``most`` names that contain ``letters`` in this order, with the best match first."""
    scored = [
        (score, len(name), name) for name in names if (score := _score(name.lower(), letters.lower())) is not None
    ]
    return [name for _, _, name in sorted(scored)[:most]]


def _score(name: str, letters: str) -> int | None:
    """Return a number for how well a path matches: lower is better. Return None if a letter is missing.

    The number is 0 if the file's name contains the letters without gaps, and 1 if the path does. Otherwise it is 2 plus
    the number of characters between the letters.
    """
    if letters in os.path.basename(name):
        return 0
    if letters in name:
        return 1
    at, gaps = -1, 2
    for letter in letters:
        found = name.find(letter, at + 1)
        if found < 0:
            return None
        gaps += found - at - 1 if at >= 0 else 0
        at = found
    return gaps


def unfinished_mention(line: str) -> tuple[int, str] | None:
    """Find an ``@name`` at the end of ``line``. Return the column of the @, and the letters of the name so far.

    Return None if the line does not end with an ``@name``.
    """
    found = _BEGUN.search(line)
    return None if found is None else (found.start(), found.group(1) or found.group(2) or "")


def mention(name: str) -> str:
    """Return ``@name`` as it must be written in a question: with quotes or backslashes if the name needs them."""
    if '"' in name:
        return "@" + re.sub(r"""([\s"'\\])""", r"\\\1", name)
    return f'@"{name}"' if re.search(r"[\s'\\]", name) else f"@{name}"


def dropped_files(text: str) -> str:
    """Return mentions (``@name``) of the files that the user dropped on the terminal.

    When files are dropped, a terminal pastes the files' paths: quoted, escaped or as URLs. If the pasted ``text`` is
    anything else, return "".
    """
    if len(text) > _LONGEST_DROP or not text.lstrip().startswith(("/", "'/", '"/', "file:///")):
        return ""
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    names = [unquote(word.removeprefix("file://")) if word.startswith("file:///") else word for word in words]
    if all(name.startswith("/") and os.path.isfile(name) for name in names):
        return " ".join(map(mention, names)) + " "
    return ""


def with_files(question: str, folder: Path) -> str:
    """Return the question, followed by the text of each mentioned file in a code fence with the file's name.

    A quoted path or a file URL mentions a file just like ``@``. If the question already has the fence of a file, the
    file is not added again.

    Raises:
        UsageError: a file is too large, is not text, or cannot be read. It is also raised if a mention looks like a
            file's name or path, but there is no such file.
    """
    if "\n" not in question:
        question = _DROPPED.sub(lambda found: dropped_files(found[0]).strip() or found[0], question)
    parts = [question]
    for name, path in dict(_mentioned(question, folder)).items():
        fence_of = re.compile(rf"^`{{3,}}{re.escape(clean_line(name))}$", re.MULTILINE)
        if not fence_of.search(question):
            parts.append(_fenced(name, _text_of(name, path)))
    return "\n\n".join(parts)


def holds_file(question: str) -> bool:
    """Return whether the question contains the text of a file that it mentions: see `with_files`."""
    names = _names_in(question)
    return any(found[1].rstrip(_TRAILING) in names for found in _FENCE.finditer(question))


def folded_files(question: str) -> tuple[str, dict[str, str]]:
    """Replace each file's text in a question by a mark such as ``[a.txt: 2 KiB, 40 lines]``.

    Return the new question, and a dictionary mark -> text.
    """
    names, marks = _names_in(question), dict[str, str]()

    def folded(found: re.Match[str]) -> str:
        _, name, text = found.groups()
        if name.rstrip(_TRAILING) not in names:
            return found[0]
        lines = plural(text.count("\n") + 1, "line")
        mark = f"[{name}: {size(len(text.encode('utf-8', 'replace')))}, {lines}]"
        marks[mark] = found[0]
        return mark

    return (_FENCED.sub(folded, question) if names else question), marks


def _names_in(question: str) -> set[str]:
    return {name.rstrip(_TRAILING) for found in _MENTION.finditer(question) for name in _possible_names(found)}


def _possible_names(found: re.Match[str]) -> list[str]:
    """Return the file names that a mention may mean, such as ``a.txt.`` and ``a.txt`` for ``@a.txt.``."""
    quoted, apart, bare = found.groups()
    if quoted or apart:
        return [quoted or apart]
    plain = re.sub(r"\\(.)", r"\1", bare)
    names = [bare, bare.rstrip(_TRAILING), plain, plain.rstrip(_TRAILING)]
    if bare.startswith("file:///"):
        names += [unquote(name.removeprefix("file://")) for name in names[:2]]
    return [name for name in dict.fromkeys(names) if name]


def _mentioned(question: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for found in _MENTION.finditer(question):
        for name in (names := _possible_names(found)):
            try:
                path = folder / expanded(name, "@")
                is_there = path.exists()
            except (UsageError, OSError, ValueError):  # not a path at all
                continue
            if is_there:
                yield name, path
                break
        else:
            is_name = _FILE_NAME.fullmatch(names[-1]) and names[-1] not in _FENCE.findall(question)
            if is_name and not _is_code(question, found.start()):
                shown = clean_line(names[-1], 80)
                raise UsageError(f"@{shown}: no such file; put a space after the @ if it is no file")


def _is_code(question: str, at: int) -> bool:
    """Return whether position ``at`` is in a code fence or in a decorator, where ``@`` is no mention."""
    spans = [found.span() for pattern in (_FENCES, _DECORATOR) for found in pattern.finditer(question)]
    return any(start <= at < end for start, end in spans)


def _text_of(name: str, path: Path) -> str:
    shown = clean_line(name, 80)
    if not path.is_file():  # a folder; reading a pipe would block
        raise UsageError(f"@{shown} is not a file; name a file in it")
    try:
        length = path.stat().st_size
        if length > LONGEST_FILE:
            raise UsageError(
                f"@{shown} has {size(length)}, but a question can hold {size(LONGEST_FILE)}: send a part of it"
            )
        with path.open("rb") as file:
            data = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"@{shown} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"@{shown} is not UTF-8 text; only text can be sent")
    return text.replace("\r\n", "\n")


def _fenced(name: str, text: str) -> str:
    longest = max((len(each) for each in re.findall(r"^\s*(`{3,})", text, re.MULTILINE)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{clean_line(name)}\n{text.rstrip(chr(10))}\n{fence}"
