"""``@file`` in a question: names of files, found by some of their letters or by their path, and their text."""

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

LONGEST_FILE = 64 << 10  # bytes of text in a question
_MOST_FILES, _LONGEST_WALK = 20_000, 0.3  # that are offered; seconds for looking
_SKIPPED = {"node_modules", "__pycache__", "venv", "target", "dist", "build"}  # folders nobody means
_MENTION = re.compile(r"""(?<!\S)@(?:"([^"\n]+)"|'([^'\n]+)'|((?:\\[^\n]|\S)+))""")
_FENCE = re.compile(r"^`{3,}([^`\n]+)$", re.MULTILINE)
_FENCED = re.compile(r"^(`{3,})([^`\n]+)\n(.*?)\n?^\1$", re.MULTILINE | re.DOTALL)
_DROPPED = re.compile(r"""(?<!\S)(?:'/[^'\n]+'|"/[^"\n]+"|file:///\S+)(?!\S)""")
_LONGEST_DROP = 10_000  # characters of paths
_FILE_NAME = re.compile(r".*\.[A-Za-z]\w{0,4}|(?=.*[A-Za-z]).*/.*")  # an extension, or a path
_FENCES = re.compile(r"^ *(`{3,}|~{3,}).*?(?:^ *\1|\Z)", re.MULTILINE | re.DOTALL)
_DECORATOR = re.compile(
    r"^[ \t]*@\S.*\n(?=\s*(?:@|(?:async|def|class|function|export|public|private|protected|static)\b))", re.MULTILINE
)
_BEGUN = re.compile(r'(?<!\S)@(?:"([^"\n]*)|([^"\s]*))$')
_TRAILING = ",.;:!?)]}'"  # of a sentence, not of a name


def files_below(folder: Path) -> list[str]:
    """Names of files, relative to ``folder``, those of upper folders first; hidden ones are left out."""
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
    """Whether what is typed of a name begins as a path out of the folder does: ``/``, ``~/``, ``./``, ``../``."""
    return letters.startswith(("/", "./", "../")) or (letters.startswith("~") and "/" in letters)


def paths_begun(letters: str, folder: Path) -> list[str]:
    """The paths that begin so, sorted, folders with a slash behind them; hidden ones where a dot is typed."""
    head, _, begun = letters.rpartition("/")
    try:
        entries = list(itertools.islice(os.scandir(folder / expanded(f"{head}/", "@")), _MOST_FILES))
    except (UsageError, OSError):
        return []
    shown = [entry for entry in entries if entry.name.startswith(begun) and (begun or entry.name[0] != ".")]
    return sorted(f"{head}/{entry.name}{'/' * entry.is_dir()}" for entry in shown)


def best_matches(names: Sequence[str], letters: str, most: int) -> list[str]:
    """The names that have these letters in this order, the closest first."""
    scored = [
        (score, len(name), name) for name in names if (score := _score(name.lower(), letters.lower())) is not None
    ]
    return [name for _, _, name in sorted(scored)[:most]]


def _score(name: str, letters: str) -> int | None:
    """The gaps between the letters in a name, 0 where they are one piece of its last part; None where one lacks."""
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


def begun_mention(line: str) -> tuple[int, str] | None:
    """Where an ``@name`` begins that a line ends with, and the letters that are typed of it."""
    found = _BEGUN.search(line)
    return None if found is None else (found.start(), found.group(1) or found.group(2) or "")


def mention(name: str) -> str:
    """How a question names a file."""
    if '"' in name:
        return "@" + re.sub(r"""([\s"'\\])""", r"\\\1", name)
    return f'@"{name}"' if re.search(r"[\s'\\]", name) else f"@{name}"


def dropped_files(text: str) -> str:
    """How a question names files that were dropped on the terminal: it pastes their paths, quoted, with backslashes or
    as URLs. Empty where the text is something else.
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
    """The question, and behind it the text of every file that it names, each in a fence with its name.

    A quoted path or a URL of a file names it like an ``@``. A file whose fence stands there already is not added again.

    Raises:
        UsageError: a file is too large, no text, or cannot be read; or a name that can only be a file's is of none.
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
    """Whether a file that the question names stands behind it; see `with_files`."""
    names = _names_in(question)
    return any(found[1].rstrip(_TRAILING) in names for found in _FENCE.finditer(question))


def folded_files(question: str) -> tuple[str, dict[str, str]]:
    """The question as people are shown it, with a mark for every file that it names, and what each mark stands for."""
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
    """The names that a mention may mean, without a sentence's end or with backslashes taken for blanks, say."""
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
            except (UsageError, OSError, ValueError):  # no path at all
                continue
            if is_there:
                yield name, path
                break
        else:
            is_name = _FILE_NAME.fullmatch(names[-1]) and names[-1] not in _FENCE.findall(question)
            if is_name and not _is_code(question, found.start()):
                shown = clean_line(names[-1], 80)
                raise UsageError(f"@{shown}: there is no such file; with a blank after the @ it is a word")


def _is_code(question: str, at: int) -> bool:
    """Whether a place is in a fence, or a decorator's."""
    spans = [found.span() for pattern in (_FENCES, _DECORATOR) for found in pattern.finditer(question)]
    return any(start <= at < end for start, end in spans)


def _text_of(name: str, path: Path) -> str:
    shown = clean_line(name, 80)
    if not path.is_file():  # a folder; a pipe would be waited for
        raise UsageError(f"@{shown} is no file; name one in it")
    try:
        length = path.stat().st_size
        if length > LONGEST_FILE:
            raise UsageError(
                f"@{shown} has {size(length)}, and a question takes {size(LONGEST_FILE)}: send a part of it"
            )
        with path.open("rb") as file:
            data = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"@{shown} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"@{shown} is no text in UTF-8: only text can be sent")
    return text.replace("\r\n", "\n")


def _fenced(name: str, text: str) -> str:
    longest = max((len(each) for each in re.findall(r"^\s*(`{3,})", text, re.MULTILINE)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{clean_line(name)}\n{text.rstrip(chr(10))}\n{fence}"
