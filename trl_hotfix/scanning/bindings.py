"""One walk over the syntax tree of a script: it collects where names get their values, and the calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from .scopes import SCOPE_NODES, Binding, Scope, source_text

_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)


class ScriptBindings:
    """The bindings of a script.

    ``calls`` has every call with its scope, in the order of the file. ``scopes`` has the inner scope of each class,
    function, lambda and comprehension.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.scopes: dict[ast.AST, Scope] = {}
        self._walk(tree)

    def _walk(self, tree: ast.Module) -> None:
        # A stack, as deeply nested source would exceed Python's limit of recursion.
        stack: list[tuple[ast.AST, Scope, bool]] = [(tree, Scope(None), True)]
        while stack:
            node, scope, unconditional = stack.pop()
            children = list(self._enter(node, scope, unconditional))
            stack.extend(reversed(children))
        self.calls.sort(key=_position)

    def _enter(self, node: ast.AST, scope: Scope, unconditional: bool) -> Iterator[tuple[ast.AST, Scope, bool]]:
        """Record the bindings and the call of ``node``, and yield its children with their scopes."""
        children: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, SCOPE_NODES):
            yield from self._enter_scope(node, scope, unconditional, children)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _bind_imports(node, scope, unconditional)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            scope.outer_names.update(node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                _assign(target, node.value, scope, unconditional)
            children = [node.value, *(target for target in targets if isinstance(target, ast.Subscript))]
        elif isinstance(node, ast.AugAssign):
            _assign(node.target, None, scope, unconditional)
            children = [node.value]
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            reason = f"{node.id} is not assigned once and for all"
            scope.bind(node.id, Binding(node.lineno, unconditional, reason=reason))
        elif isinstance(node, ast.Call):
            self.calls.append((node, scope))
        elif isinstance(node, (ast.ExceptHandler, ast.pattern)):
            for name in (getattr(node, "name", None), getattr(node, "rest", None)):
                if isinstance(name, str):
                    scope.bind(name, Binding(node.lineno, unconditional, reason=f"{name} is what was found"))
        if isinstance(node, _BRANCHES) and not _is_main(node):
            unconditional = False
        yield from ((child, scope, unconditional) for child in children)

    def _enter_scope(
        self, node: Any, scope: Scope, unconditional: bool, children: list[ast.AST]
    ) -> Iterator[tuple[ast.AST, Scope, bool]]:
        """Bind the name and the parameters. Defaults, decorators and base classes belong to the outer scope."""
        inner = Scope(scope, of_class=isinstance(node, ast.ClassDef))
        self.scopes[node] = inner
        name = getattr(node, "name", None)
        if name is not None:
            scope.bind(name, Binding(node.lineno, unconditional, definition=node))
        signature = getattr(node, "args", None)
        if signature is not None:
            _bind_parameters(signature, name or "a lambda", inner)
            defaults = [*signature.defaults, *filter(None, signature.kw_defaults)]
            yield from ((default, scope, unconditional) for default in defaults)
            children = [child for child in children if child is not signature]
        outer = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ()), *getattr(node, "keywords", ())]
        yield from ((child, scope, unconditional) for child in outer)
        yield from ((child, inner, True) for child in children if child not in outer)


def _position(scoped_call: tuple[ast.Call, Scope]) -> tuple[int, int]:
    call, _ = scoped_call
    return call.lineno, call.col_offset


def _bind_parameters(signature: ast.arguments, function: str, scope: Scope) -> None:
    positional = [*signature.posonlyargs, *signature.args, signature.vararg]
    for parameter in filter(None, [*positional, *signature.kwonlyargs, signature.kwarg]):
        reason = f"{parameter.arg} is a parameter of {function}"
        scope.bind(parameter.arg, Binding(parameter.lineno, True, reason=reason))


def _bind_imports(node: ast.Import | ast.ImportFrom, scope: Scope, unconditional: bool) -> None:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            dotted = f"{'.' * node.level}{node.module or ''}.{alias.name}"
        else:
            dotted = alias.name if alias.asname else alias.name.partition(".")[0]
        name = alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else dotted)
        scope.bind(name, Binding(node.lineno, unconditional, dotted=dotted))


def _assign(target: ast.expr, value: ast.expr | None, scope: Scope, unconditional: bool) -> None:
    """Bind ``target`` to ``value``; None: the target is changed in place."""
    if isinstance(target, (ast.Tuple, ast.List)):
        _assign_elements(target, value, scope, unconditional)
    elif isinstance(target, ast.Name):
        reason = "" if value is not None else f"{target.id} is changed in place"
        scope.bind(target.id, Binding(target.lineno, unconditional, value, reason))
    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        reason = "" if value is not None else f"{source_text(target)} is changed in place"
        assignments = scope.attributes.setdefault((target.value.id, target.attr), [])
        assignments.append(Binding(target.lineno, unconditional, value, reason))


def _assign_elements(targets: ast.Tuple | ast.List, value: ast.expr | None, scope: Scope, unconditional: bool) -> None:
    """Bind ``a, b = 1, 2`` element by element; if the value has no such elements, those of ``a, b`` are unknown."""
    elements: list[ast.expr | None] = [None] * len(targets.elts)
    starred = any(isinstance(target, ast.Starred) for target in targets.elts)
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(elements) and not starred:
        elements = list(value.elts)
    reason = f"a part of {source_text(value)}" if value is not None else ""
    for target, element in zip(targets.elts, elements, strict=True):
        target = target.value if isinstance(target, ast.Starred) else target
        if element is None and isinstance(target, ast.Name):
            binding = Binding(target.lineno, unconditional, reason=f"{target.id} is {reason}")
            scope.bind(target.id, binding)
        else:
            _assign(target, element, scope, unconditional)


def _is_main(node: ast.AST) -> bool:
    """Is the node ``if __name__ == "__main__":``?"""
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
