"""Parts of a config of OmegaConf: ``cfg.trainer.beta``, ``cfg["trainer"]["beta"]``, ``**cfg.trainer``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from ..catalogue.conditions import Argument, Kind
from .hydra_mains import Given, given_by_call, given_by_hydra, uses_settings
from .names import dotted_name, returned
from .origins import Evaluate
from .scopes import Scope, ScopedExpression, source_text
from .settings_files import Keys, Settings
from .settings_uses import Change, changes

_MOST_STEPS = 40
_METHODS = frozenset(["copy", "get", "items", "keys", "merge_with", "pop", "setdefault", "update", "values"])
_COPIES = ("omegaconf.OmegaConf.to_container", "omegaconf.OmegaConf.to_object")


class _Located(NamedTuple):
    """A part of a config. ``names`` hold it, or what it is a part of, each with its scope and the keys below it.

    ``is_plain``: a copy of plain dicts and lists. ``is_resolved``: its references are values.
    """

    given: Given
    path: Keys
    names: list[tuple[str, Scope, Keys]]
    is_plain: bool
    is_resolved: bool


def told_setting(expression: ScopedExpression, evaluate: Evaluate) -> Argument | None:
    """Return a part of a config, or None if the expression is no part of one."""
    node = expression.node
    if not isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        return None
    located = _located(expression, evaluate)
    if located is None or not (located.path or located.is_plain):
        return None
    unknown = _unknown(located, expression)
    settings = located.given.settings
    if unknown is not None or settings is None:
        return unknown
    change = next((one for one in _changes(located, settings) if _touches(one, located.path, settings)), None)
    if change is not None:
        return Argument(Kind.UNKNOWN, line=change.line, reason=change.reason)
    value = settings.argument(located.path, node.lineno, is_plain=located.is_plain)
    if value.kind is Kind.LITERAL and value.value is None and isinstance(node, ast.Call):
        # Releases of OmegaConf differ in whether ``get`` returns its default then.
        return Argument(Kind.UNKNOWN, line=node.lineno, reason=f"{source_text(node)} may be its default")
    if not located.is_resolved and value.kind is Kind.LITERAL and settings.reference(located.path) != located.path:
        return Argument(Kind.UNKNOWN, line=node.lineno, reason=f"{source_text(node)} is not resolved")
    if not settings.untold:
        return value
    known = f", with the default {value.value!r} ({value.place})" if value.kind is Kind.LITERAL else ""
    return Argument(Kind.UNKNOWN, line=node.lineno, reason=f"{source_text(node)} is of the command line{known}")


def told_keys(expression: ScopedExpression, evaluate: Evaluate) -> Sequence[str] | Argument | None:
    """Return the keys of a mapping in a config, or the unknown argument. None if it is no such mapping."""
    located = _located(expression, evaluate)
    if located is None:
        return None
    unknown = _unknown(located, expression)
    settings = located.given.settings
    if unknown is not None or settings is None:
        return unknown
    line, text = expression.node.lineno, source_text(expression.node)
    try:
        found = settings.at(located.path)
    except KeyError:
        found = None
    own = isinstance(expression.node, ast.Name) and located.is_plain
    for change in _changes(located, settings, without_first=own):
        key = change.path[len(located.path) : len(located.path) + 1]
        if change.touches(located.path) and not (found and key and key[0] in found):
            return Argument(Kind.UNKNOWN, line=change.line, reason=change.reason)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        return Argument(Kind.UNKNOWN, line=line, reason=f"**{text} may set it")
    if settings.untold:
        return Argument(Kind.UNKNOWN, line=line, reason=f"**{text} is of the command line")
    return [*found]


def _unknown(located: _Located, expression: ScopedExpression) -> Argument | None:
    given = located.given
    if given.settings is not None:
        return None
    text = source_text(expression.node)
    of_words = f"{text} is of the command line, and " if given.reads_words else f"{text} is of a file, and "
    return Argument(Kind.UNKNOWN, line=expression.node.lineno, reason=f"{of_words}{given.unclear or given.refused}")


def _touches(change: Change, path: Keys, settings: Settings) -> bool:
    """May a change set a value, or what it refers to?"""
    try:
        found = settings.reference(path)
    except KeyError:
        found = None
    return change.touches(path) or found is None or (found != path and change.touches(found))


def _changes(located: _Located, settings: Settings, *, without_first: bool = False) -> list[Change]:
    """Return what may change the config by the names that hold it."""
    found: list[Change] = []
    for count, (name, owner, below) in enumerate(located.names):
        if not (without_first and count == 0):
            above = located.path[: len(located.path) - len(below)]
            known = located.given.changes
            if (name, id(owner), above) not in known:
                known[name, id(owner), above] = changes(name, owner, above, settings)
            found += known[name, id(owner), above]
    return found


def _located(expression: ScopedExpression, evaluate: Evaluate) -> _Located | None:
    """Follow a part of a config to the function that gets it, or to the file."""
    keys: Keys = ()
    names: list[tuple[str, Scope, Keys]] = []
    is_plain, is_resolved = False, True
    if not uses_settings(expression.scope.module):
        return None
    for _ in range(_MOST_STEPS):
        expression.budget.spend()
        node = expression.node
        step: ast.expr | None = None
        if isinstance(node, ast.Name):
            bound = expression.find(node)
            value = bound.value() if bound is not None else None
            if bound is None:
                return None
            names.append((node.id, bound.scope, keys))
            if value is None:
                definition = bound.binding.parameter_of
                module = expression.scope.module
                given = given_by_hydra(definition, module, evaluate) if definition is not None else None
                return _Located(given, keys, names, is_plain, is_resolved) if given is not None else None
            expression = value
            continue
        if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
            step, keys = node.value, (node.attr, *keys)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if not isinstance(node.slice.value, str):
                return None
            step, keys = node.value, (node.slice.value, *keys)
        elif isinstance(node, ast.Call):
            given = given_by_call(expression, evaluate)
            if given is not None:
                return _Located(given, keys, names, is_plain, is_resolved)
            key = _key_of_get(node)
            if key is not None and isinstance(node.func, ast.Attribute):
                step, keys = node.func.value, (key, *keys)
            elif _is_copy(expression):
                step, is_plain = node.args[0], True
                is_resolved = is_resolved and _resolves(expression, node, evaluate)
            elif _is_dict(expression):
                step = node.args[0]
            else:
                result = returned(expression)
                if result is None:
                    return None
                expression = result
                continue
        if step is None:
            return None
        expression = expression.with_node(step)
    return None


def _key_of_get(call: ast.Call) -> str | None:
    """Return the key in ``cfg.get("key")``."""
    is_get = isinstance(call.func, ast.Attribute) and call.func.attr == "get" and len(call.args) in (1, 2)
    key = call.args[0] if is_get and not call.keywords else None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def _is_copy(expression: ScopedExpression) -> bool:
    node = expression.node
    return (
        isinstance(node, ast.Call) and len(node.args) == 1 and dotted_name(expression.with_node(node.func)) in _COPIES
    )


def _is_dict(expression: ScopedExpression) -> bool:
    node = expression.node
    is_call = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
    return is_call and isinstance(node, ast.Call) and dotted_name(expression.with_node(node.func)) == "dict"


def _resolves(expression: ScopedExpression, call: ast.Call, evaluate: Evaluate) -> bool:
    """Does ``OmegaConf.to_container(cfg, resolve=True)`` put values in the place of references?"""
    if dotted_name(expression.with_node(call.func)) == _COPIES[1]:
        return True
    given = {keyword.arg: expression.with_node(keyword.value) for keyword in call.keywords}
    return "resolve" in given and evaluate(given["resolve"]).value is True
