"""One walk over the syntax tree of a script: it collects where names get their values, and the calls."""

from __future__ import annotations

import ast
import bisect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .budget import Budget, TooLargeError
from .scopes import COMPREHENSIONS, FUNCTIONS, MOST_LEVELS, SCOPE_NODES, Binding, Place, Scope, called_name, source_text

if TYPE_CHECKING:
    from .beside import Beside

_BRANCHES: tuple[type[ast.AST], ...] = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match),
    # An error ends the body of a `with` early, and some context managers hold it back.
    *(ast.With, ast.AsyncWith),
    # `except*` is new in Python 3.11.
    getattr(ast, "TryStar", ast.Try),
)
_KNOWN_PACKAGES = frozenset(["datasets", "peft", "torch", "transformers", "trl", "typing"])
DYNAMIC_FUNCTIONS = frozenset(["eval", "exec", "globals", "locals", "vars"])


def parsed(source: bytes) -> ast.Module:
    """Return the syntax tree. Raises what ``ast.parse`` raises, and warns of nothing, such as an invalid escape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


class ScriptBindings:
    """The bindings of a script.

    ``calls`` has every call with its place, in the order of the file. ``scopes`` has the inner scope of each class,
    function, lambda and comprehension. ``set_on_modules`` has the attributes that are set on what is imported or on
    classes, such as ``DPOConfig.beta = 1``, and their lines. ``dynamic`` is the first call of ``exec`` and the like,
    which may set anything. ``budget`` has the steps that the answers to questions about the script may take, and
    ``beside`` the files that it may import. ``names`` has every name, and ``texts`` every string;
    ``followed`` has the nodes that lead to trainers that are found. ``set_by_imports`` is what ``imported_files`` finds
    when it is asked. Raises ``TooLargeError`` if scopes are too deeply
    within each other.
    """

    def __init__(self, tree: ast.Module, words: Sequence[str] | None = None, beside: Beside | None = None) -> None:
        self.calls: list[Place] = []
        self.scopes: dict[ast.AST, Scope] = {}
        self.set_on_modules: dict[str, int] = {}
        self.dynamic: ast.Call | None = None
        self.budget = Budget()
        self.followed: set[ast.AST] = set()
        self._fixed_names: dict[Scope, set[str]] = {}
        self.names: list[Place] = []
        self.texts: list[Place] = []
        self.beside = beside
        self.set_by_imports: Mapping[str, tuple[str, int]] | None = None
        file = beside.script if beside is not None else None
        module = self.module = Scope(None, words=words, inner=self.scopes, budget=self.budget, file=file)
        # A stack, as deeply nested source would exceed Python's limit of recursion.
        stack = [Place(tree, None, module, True)]
        while stack:
            place = stack.pop()
            if isinstance(place.node, ast.Name):
                self.names.append(place)
            elif isinstance(place.node, ast.Call):
                self.calls.append(place)
            elif isinstance(place.node, ast.Constant) and isinstance(place.node.value, str):
                self.texts.append(place)
            stack.extend(reversed(list(self._enter(place))))
        self.calls.sort(key=_position)
        for scope in (module, *self.scopes.values()):
            _rebind_by_star_imports(scope)
            # Modules, classes and functions.
            self._fixed_names[scope] = {
                name for name, found in scope.bindings.items() if any(one.dotted or one.definition for one in found)
            }
        for place in self.names:
            self._note_use(place)
        for place in self.calls:
            self._bind_arguments(place)

    def _note_use(self, place: Place) -> None:
        name = place.node
        assert isinstance(name, ast.Name)
        owner = place.scope.owner(name.id)
        if owner is None:
            if name.id in DYNAMIC_FUNCTIONS and self.dynamic is None:
                parent = place.parent.node if place.parent is not None else None
                if isinstance(parent, ast.Call) and parent.func is name and (name.id != "vars" or not parent.args):
                    self.dynamic = parent
            return
        owner.uses.setdefault(name.id, []).append(place)
        if name.id in self._fixed_names[owner]:
            self._note_attributes_set(place)

    def _bind_arguments(self, place: Place) -> None:
        """Bind the parameters of a function to the arguments of its call, if the script calls it at one place."""
        call = place.node
        assert isinstance(call, ast.Call)
        if not isinstance(call.func, ast.Name) or any(isinstance(argument, ast.Starred) for argument in call.args):
            return
        owner = place.scope.owner(call.func.id)
        if owner is None or len(owner.uses[call.func.id]) > 1 or len(owner.bindings[call.func.id]) > 1:
            return
        function = owner.bindings[call.func.id][0].definition
        if not isinstance(function, FUNCTIONS) or function.decorator_list:
            return
        positional = [*function.args.posonlyargs, *function.args.args]
        named = {parameter.arg for parameter in [*positional, *function.args.kwonlyargs]}
        given = {parameter.arg: value for parameter, value in zip(positional, call.args, strict=False)}
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in named}
        inner = self.scopes[function]
        for name, value in given.items():
            # A parameter that is assigned again has several bindings, and the first is this one.
            first, *others = inner.bindings[name]
            inner.bindings[name] = [replace(first, value=value, argument_at=place), *others]

    def _note_attributes_set(self, place: Place) -> None:
        """Note ``a.b.c = 1``, ``setattr(a.b, "c", 1)`` and ``a.b.__dict__``, where ``a`` is a module or a class."""
        owner, parent = place.node, place.parent
        while parent is not None and isinstance(parent.node, ast.Attribute):
            if not isinstance(parent.node.ctx, ast.Load) or parent.node.attr == "__dict__":
                self.set_on_modules.setdefault(parent.node.attr, parent.line)
            owner, parent = parent.node, parent.parent
        call = parent.node if parent is not None else None
        if not isinstance(call, ast.Call) or call.args[:1] != [owner]:
            return
        if called_name(call.func).endswith(("setattr", "__setattr__")):
            key = call.args[1] if len(call.args) > 1 else None
            name = key.value if isinstance(key, ast.Constant) else "__dict__"
            self.set_on_modules.setdefault(str(name), call.lineno)

    def _enter(self, place: Place) -> Iterator[Place]:
        """Record the bindings of a node, and yield the places of its children."""
        node, scope, unconditional = place.node, place.scope, place.unconditional
        if isinstance(node, SCOPE_NODES):
            yield from self._enter_scope(node, place)
            return
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            scope.loops.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            _bind_imports(node, scope, unconditional)
        elif isinstance(node, ast.Global):
            scope.global_names.update(node.names)
        elif isinstance(node, ast.Nonlocal):
            scope.nonlocal_names.update(node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # Names that are assigned together hold one object, which may be changed under each of them.
            shared = len(targets) > 1 and not isinstance(node.value, ast.Constant)
            for target in targets:
                _assign(target, None if shared else node.value, scope, unconditional)
        elif isinstance(node, ast.AugAssign):
            _assign(node.target, None, scope, unconditional)
        elif isinstance(node, ast.NamedExpr):
            reason = f"{node.target.id} is assigned within an expression"
            scope.bind_in_function(node.target.id, Binding(node.lineno, False, reason=reason))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and not _is_assigned(place):
            reason = f"{node.id} is not assigned once and for all"
            scope.bind(node.id, Binding(node.lineno, unconditional, reason=reason))
        elif isinstance(node, (ast.ExceptHandler, ast.pattern)):
            for name in (getattr(node, "name", None), getattr(node, "rest", None)):
                if isinstance(name, str):
                    scope.bind(name, Binding(node.lineno, unconditional, reason=f"{name} is what was found"))
        in_main = set(node.body) if isinstance(node, ast.If) and _is_main(node) else ()
        for child in ast.iter_child_nodes(node):
            certain = unconditional and (not isinstance(node, _BRANCHES) or child in in_main)
            yield Place(child, place, scope, certain)

    def _enter_scope(self, node: Any, place: Place) -> Iterator[Place]:
        """Bind the name and the parameters. Defaults, decorators and base classes belong to the outer scope."""
        scope, unconditional = place.scope, place.unconditional
        inner = Scope(scope, isinstance(node, ast.ClassDef), isinstance(node, COMPREHENSIONS))
        if inner.level > MOST_LEVELS:
            raise TooLargeError
        self.scopes[node] = inner
        children = list(ast.iter_child_nodes(node))
        name = getattr(node, "name", None)
        if name is not None:
            scope.bind(name, Binding(node.lineno, unconditional, definition=node))
        signature = getattr(node, "args", None)
        if signature is not None:
            _bind_parameters(signature, node, inner)
            defaults = [*signature.defaults, *filter(None, signature.kw_defaults)]
            yield from (Place(default, place, scope, unconditional) for default in defaults)
            children = [child for child in children if child is not signature]
        outer = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ()), *getattr(node, "keywords", ())]
        yield from (Place(child, place, scope, unconditional) for child in outer)
        # What stands in a comprehension runs as often as it has elements.
        runs_once = not isinstance(node, COMPREHENSIONS)
        own = set(children).difference(outer)
        yield from (Place(child, place, inner, runs_once) for child in children if child in own)


def _position(place: Place) -> tuple[int, int]:
    call = place.node
    assert isinstance(call, ast.Call)
    return call.lineno, call.col_offset


def _is_assigned(place: Place) -> bool:
    """Is the name a target of ``a = 1``, ``a, b = 1, 2``, ``a: int = 1``, ``a += 1`` or ``(a := 1)``?

    These are bound where the walk meets the statement.
    """
    parent = place.parent
    while parent is not None and isinstance(parent.node, (ast.Tuple, ast.List, ast.Starred)):
        parent = parent.parent
    return parent is not None and isinstance(parent.node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr))


def _rebind_by_star_imports(scope: Scope) -> None:
    """``from x import *`` may set any name that has a value before. The first one that comes later is enough."""
    stars = sorted(
        (line, module) for module, line in scope.star_imports.items() if module.split(".")[0] not in _KNOWN_PACKAGES
    )
    for name, bindings in scope.bindings.items():
        first = min(binding.line for binding in bindings)
        star = bisect.bisect_right(stars, first, key=lambda star: star[0])
        if star < len(stars):
            line, module = stars[star]
            bindings.append(Binding(line, False, reason=f"from {module} import * may set {name}"))
        bindings.sort(key=lambda binding: binding.line)


def _bind_parameters(signature: ast.arguments, node: ast.AST, scope: Scope) -> None:
    function = getattr(node, "name", "a lambda")
    positional = [*signature.posonlyargs, *signature.args, signature.vararg]
    for parameter in filter(None, [*positional, *signature.kwonlyargs, signature.kwarg]):
        reason = f"{parameter.arg} is a parameter of {function}"
        scope.bind(parameter.arg, Binding(parameter.lineno, True, reason=reason, parameter_of=node))


def _bind_imports(node: ast.Import | ast.ImportFrom, scope: Scope, unconditional: bool) -> None:
    for alias in node.names:
        if alias.name == "*" and isinstance(node, ast.ImportFrom):
            scope.star_imports[f"{'.' * node.level}{node.module or ''}"] = node.lineno
            continue
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
        reason = "" if value is not None else f"{target.id} is assigned with others, or changed in place"
        scope.bind(target.id, Binding(target.lineno, unconditional, value, reason))


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
            binding = Binding(target.lineno, unconditional, reason=f"{target.id} is {reason}", part_of=value)
            scope.bind(target.id, binding)
        else:
            _assign(target, element, scope, unconditional)


def _is_main(node: ast.If) -> bool:
    """Is the statement ``if __name__ == "__main__":``?"""
    test = node.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    return {source_text(test.left), source_text(test.comparators[0])} == {"__name__", "'__main__'"}
