"""Resolve references within a JSON schema: find the subschemas that ``$ref`` and similar keywords name."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from minillm.errors import UsageError
from minillm.text.safe import clean_line

_REFERENCES = ("$ref", "$recursiveRef", "$dynamicRef")
_DATA = ("const", "enum", "default", "examples", "example")  # their values are not schemas
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # their keys are names
_OLD = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")


class References:
    """Resolves the references of one schema.

    Attributes:
        is_old: the schema's draft ignores keywords next to ``$ref``.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._bases: dict[int, str] = {}  # base URIs, by the id() of schemas
        self._named: dict[str, Any] = {"": root}
        self._dynamic: list[Any] = []  # dynamic anchors; what they name depends on the path to a reference
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self.is_old = isinstance(dialect, str) and any(draft in dialect for draft in _OLD)
        self._documents: set[str] = set()
        self._walk(root, "")

    def _walk(self, node: Any, base: str) -> None:
        if isinstance(node, list):
            for each in node:
                self._walk(each, base)
        if not isinstance(node, dict):
            return
        is_ignored = self.is_old and "$ref" in node
        for key in () if is_ignored else ("$id", "id"):
            if isinstance(node.get(key), str):
                base = self._name(node, base, node[key])
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self._named.setdefault(f"{base}#{node[key]}", node)
        self._dynamic += [node[key] for key in ("$dynamicAnchor", "$recursiveAnchor") if node.get(key)]
        self._bases[id(node)] = base
        for key, value in node.items():
            if key in _BY_NAME and isinstance(value, dict):
                self._walk(list(value.values()), base)
            elif key not in _DATA:
                self._walk(value, base)

    def _name(self, node: Any, base: str, name: str) -> str:
        """Register ``node`` under the URI that ``name`` gives when it is resolved against the URI ``base``.

        Return the URI against which the names inside ``node`` are resolved.
        """
        document, _, fragment = _joined(base, name).partition("#")
        if fragment:
            self._named.setdefault(f"{document}#{fragment}", node)
            return base
        self._documents.add(document)
        self._named.setdefault(document, node)
        return document

    def has(self, node: Any) -> bool:
        """Return whether ``node`` is part of the original schema, rather than created by a rewrite."""
        return id(node) in self._bases

    def target(self, node: dict[str, Any]) -> Any:
        """Return the schema that the reference in ``node`` names.

        If this schema is only a reference as well, follow it. Raises UsageError if a referenced schema does not exist,
        or if the references form a cycle.
        """
        [key, *_] = (each for each in _REFERENCES if each in node)
        reference = node[key]
        if not isinstance(reference, str):
            raise UsageError(f"grammar: the JSON schema has a {key} that is not a text")
        if key != "$ref" and (len(set(map(str, self._dynamic))) < len(self._dynamic) or len(self._documents) > 1):
            raise UsageError(f"grammar: the JSON schema has a {key} to one of several schemas; use $ref")
        seen = {id(node)}
        found = self._find(_joined(self._bases.get(id(node), ""), reference), reference)
        while isinstance(found, dict) and set(found) & set(_REFERENCES) and len(_constraints(found)) == 1:
            if id(found) in seen:
                raise UsageError(f"grammar: the JSON schema has a reference to itself: {clean_line(reference, 100)}")
            seen.add(id(found))
            [key, *_] = (each for each in _REFERENCES if each in found)
            found = self._find(_joined(self._bases.get(id(found), ""), str(found[key])), str(found[key]))
        return found

    def _find(self, address: str, reference: str) -> Any:
        document, _, fragment = address.partition("#")
        if address in self._named:
            return self._named[address]
        found = self._named.get(document)
        try:
            if found is None or (fragment and not fragment.startswith("/")):
                raise LookupError
            for part in unquote(fragment).split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                found = (
                    found[int(name)]
                    if isinstance(found, list)
                    else found[name]
                    if name or found != self._root
                    else found
                )
        except (LookupError, TypeError, ValueError):
            raise UsageError(
                f"grammar: the JSON schema has a $ref to {clean_line(reference, 100)!r}, which is not in the schema"
            ) from None
        if not isinstance(found, dict | bool):
            raise UsageError(
                f"grammar: the JSON schema has a $ref to {clean_line(reference, 100)!r}, which is not a schema"
            )
        return found


def _constraints(node: dict[str, Any]) -> list[str]:
    """Return the keywords of ``node`` without annotations such as ``title``."""
    return [key for key in node if key not in ("title", "description", "$comment", "default", "examples")]


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#") or not reference:
        return base + (reference if reference != "#" else "")
    try:
        return reference if urlsplit(reference).scheme else urljoin(base, reference)
    except ValueError:
        return reference
