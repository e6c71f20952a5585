"""``sys.argv`` in a script: whether something but the parsers reads the command line, or changes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .harmless import changes_nothing, only_looks
from .scopes import Place, Scope


def change_of_argv(module: Scope) -> int | None:
    """Return the line that may change the words of the command line, if there is one."""
    return next((place.line for place in _uses(module) if not _is_read(place)), None)


def _uses(module: Scope) -> Iterator[Place]:
    for scope in (module, *module.inner.values()):
        module.budget.spend()
        for name, bindings in scope.bindings.items():
            dotted = {binding.dotted for binding in bindings}
            for use in scope.uses.get(name, ()) if dotted & {"sys", "sys.argv"} else ():
                parent = use.parent
                if "sys.argv" in dotted:
                    yield use
                elif parent is not None and isinstance(parent.node, ast.Attribute) and parent.node.attr == "argv":
                    yield parent


def _is_read(place: Place) -> bool:
    assert place.parent is not None
    node = place.parent.node
    if not isinstance(getattr(place.node, "ctx", None), ast.Load):
        return False
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    return changes_nothing(node.func) if isinstance(node, ast.Call) else only_looks(place, node)
