"""Faster styling of widgets by Textual. `textual_internals` imports this module.

Textual compares a widget with the rules of the style sheets each time it styles the widget. This module stores the
results. Another widget has the same result if its class, id, CSS classes, pseudo-classes and ancestors are the same.
"""

from functools import cache
from itertools import count
from typing import Any

from textual.css.model import RuleSet
from textual.css.styles import RulesMap
from textual.css.stylesheet import Stylesheet
from textual.dom import DOMNode

_MOST = 4096  # results to store

_textual_apply, _textual_replace_rules = Stylesheet.apply, Stylesheet.replace_rules
_of_kinds: dict[tuple[RuleSet, ...], dict[tuple[Any, ...], "_Candidates"]] = {}  # by the rules of a style sheet
_candidates: dict[tuple[RuleSet, ...], "_Candidates"] = {}
_places: dict[tuple[Any, ...], int] = {}  # the number of each path of classes, ids and CSS classes from the app down
_numbers = count()
_results: dict[tuple[Any, ...], "_Result"] = {}
_matched: dict[DOMNode, RulesMap] = {}  # the rules of nodes that Textual's `apply` is styling


class _Candidates:
    """The rules that can match the nodes of one class, id and set of CSS classes."""

    def __init__(self, rules: tuple[RuleSet, ...]) -> None:
        of_ancestors = set[str]()
        for selector in (each for rule in rules for those in rule.selector_set for each in those.selectors[:-1]):
            of_ancestors |= selector.pseudo_classes
        self.of_ancestors = tuple(of_ancestors)  # pseudo-classes of the rules
        self.of_node = tuple(set[str]().union(*[rule.pseudo_classes for rule in rules]))


class _Result:
    """The rules that match a node. ``stored``: the same rules as a node stores them."""

    def __init__(self, rules: RulesMap, node: DOMNode) -> None:
        self.rules = rules
        self.stored: RulesMap | None = None
        self.flags = node._has_hover_style, node._has_focus_within, node._has_order_style, node._has_odd_or_even

    def set_on(self, node: DOMNode, animate: bool) -> None:
        node._has_hover_style, node._has_focus_within, node._has_order_style, node._has_odd_or_even = self.flags
        base = node.styles.base
        if node._is_mounted or base._rules:
            _replace_rules(node, self.rules, animate)
        elif self.stored is None:
            _replace_rules(node, self.rules, animate)
            self.stored = base.get_rules()
        else:  # nothing can be refreshed before the node is mounted
            base.merge_rules(self.stored)
            node._nodes.updated()
            node.notify_style_update()


def _candidates_for(sheet: Stylesheet, node: DOMNode) -> _Candidates:
    rules, of_kinds = sheet.__dict__.get("_of_kinds", (None, {}))
    if rules is not sheet.rules:
        rules, of_kinds = sheet.__dict__["_of_kinds"] = sheet.rules, _of_kinds.setdefault(tuple(sheet.rules), {})
    kind = type(node), node._id, frozenset(node._classes)
    if (found := of_kinds.get(kind)) is None:
        by_name = sheet.rules_map
        matching = {rule for name in by_name.keys() & node._selector_names for rule in by_name[name]}
        those = tuple(filter(matching.__contains__, rules))
        found = of_kinds[kind] = _candidates.get(those) or _candidates.setdefault(those, _Candidates(those))
    return found


def _key(candidates: _Candidates, node: DOMNode) -> tuple[Any, ...]:
    """Return everything that decides which of the rules match a node."""
    path, place = node.css_path_nodes, -1
    for each in path:
        step = place, type(each), each._id, frozenset(each._classes)
        if (known := _places.get(step)) is None:
            known = _places[step] = next(_numbers)
        place = known
    has = tuple([node.has_pseudo_class(name) for name in candidates.of_node])
    ancestors_have = tuple([each.has_pseudo_class(name) for name in candidates.of_ancestors for each in path])
    return candidates, place, has, ancestors_have


def _apply(
    self: Stylesheet, node: DOMNode, *, animate: bool = False, cache: dict[tuple[Any, ...], RulesMap] | None = None
) -> None:
    key = _key(_candidates_for(self, node), node)
    if (result := _results.get(key)) is not None:
        result.set_on(node, animate)
        self._process_component_classes(node)
        return
    _textual_apply(self, node, animate=animate)
    if (rules := _matched.pop(node, None)) is not None:
        if len(_results) >= _MOST:
            _of_kinds.clear()
            _candidates.clear()
            _places.clear()
            _results.clear()
        _results[key] = _Result(rules, node)


def _match(node: DOMNode, rules: RulesMap, animate: bool = False) -> None:
    _matched[node] = rules
    _replace_rules(node, rules, animate)


def _replace_rules(node: DOMNode, rules: RulesMap, animate: bool) -> None:
    """Set the styles of ``node``, then refresh it and its children.

    Textual itself sets unchanged styles again, and refreshes all children after each changed one. That takes half of
    the time of a theme change.
    """
    base: Any = node.styles.base
    refreshes: dict[tuple[tuple[str, bool], ...], None] = {}
    base.refresh = lambda **options: refreshes.setdefault(tuple(options.items()))
    try:
        if animate and "transitions" in rules:
            _textual_replace_rules(node, rules, animate)
        else:
            before = base._rules
            for name in before.keys() | rules.keys():
                # Textual redraws the scrollbars whenever it sets this color, which it relies on.
                if before.get(name) is not (value := rules.get(name)) or name == "scrollbar_color":
                    setattr(base, name, value)
            node.notify_style_update()
    finally:
        del base.refresh
    for options in refreshes:
        base.refresh(**dict(options))


def _style_components(self: Stylesheet, node: DOMNode) -> None:
    """Style the component classes of ``node``. Textual itself creates new nodes for them each time."""
    changed = False
    for name in _components(type(node)):
        styles = node._component_styles.get(name)
        if styles is None:
            component = DOMNode(classes=name)
            component._attach(node)
            self.apply(component)
            node._component_styles[name] = component.styles
            changed = True
        else:
            before = styles.base.get_rules()
            assert styles.node is not None
            self.apply(styles.node)
            changed = changed or styles.base.get_rules() != before
    if changed:
        node.refresh()


@cache
def _components(kind: type[DOMNode]) -> list[str]:
    return sorted(kind._get_component_classes())


Stylesheet.apply = _apply  # type: ignore[method-assign]
Stylesheet.replace_rules = staticmethod(_match)  # type: ignore[method-assign]
Stylesheet._process_component_classes = _style_components  # type: ignore[method-assign]

# Textual's own `__hash__` is slower, because it is written in Python.
RuleSet.__hash__ = object.__hash__  # type: ignore[method-assign]
