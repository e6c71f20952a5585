"""The scopes of a script: where its names get their values, and which value a name has at a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..catalogue.conditions import Argument
from ..errors import plain
from .budget import Budget
from .command_lines import CommandLine

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPE_NODES = (*FUNCTIONS, ast.ClassDef, ast.Lambda, *COMPREHENSIONS)

MOST_LEVELS = 50
"""At most so many functions, classes, lambdas and comprehensions are within each other."""

_MOST_PARTS_OF_TEXT = 200


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """One place where a name gets its value: an expression, an imported name, or a class or function.

    ``reason`` is why the value is unknown, if the binding lacks these, and ``part_of`` the expression whose value it
    is a part of. If it is not ``unconditional``, its line may not be reached, or more than once. ``argument_at`` is
    the place of the call if the value is the argument that a function is given. ``one_of``: one of these bindings has
    the value, and the text does not settle which one. ``parameter_of``: the function whose parameter it is.
    """

    line: int
    unconditional: bool
    value: ast.expr | None = None
    reason: str = ""
    dotted: str = ""
    definition: ast.AST | None = None
    part_of: ast.expr | None = None
    argument_at: Place | None = None
    one_of: tuple[Binding, ...] = ()
    parameter_of: ast.AST | None = None


@dataclass(slots=True, eq=False)
class Scope:
    """The names of a module, a class, a function, a lambda or a comprehension.

    ``uses`` has every place where a name of this scope stands, also in inner scopes. ``global_names`` and
    ``nonlocal_names`` are those that the scope declares so. ``star_imports`` has the lines of ``from x import *``, by
    the module. ``loops`` has the lines of each loop. ``words`` are the arguments that a module starts with, if
    we have them, ``command_line`` what transformers' parser makes of them, and ``namespaces`` what other parsers do.
    ``inner`` has the scopes of all functions and classes of a module, ``values`` what its expressions evaluate to,
    ``unpacked`` what ``**options`` gives, and ``budget`` the steps that all this may take. ``file``: that of a module.
    """

    parent: Scope | None
    of_class: bool = False
    of_comprehension: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    uses: dict[str, list[Place]] = field(default_factory=dict)
    global_names: set[str] = field(default_factory=set)
    nonlocal_names: set[str] = field(default_factory=set)
    star_imports: dict[str, int] = field(default_factory=dict)
    loops: list[range] = field(default_factory=list)
    words: Sequence[str] | None = None
    command_line: CommandLine | None = None
    namespaces: dict[object, Any] = field(default_factory=dict)
    inner: Mapping[ast.AST, Scope] = field(default_factory=dict)
    values: dict[ScopedExpression, Argument] = field(default_factory=dict)
    unpacked: dict[ScopedExpression, Unpacked] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    file: Path | None = None
    module: Scope = field(init=False)
    level: int = field(init=False)

    def __post_init__(self) -> None:
        self.module = self if self.parent is None else self.parent.module
        self.level = 0 if self.parent is None else self.parent.level + 1

    def bind(self, name: str, binding: Binding) -> None:
        """Add a binding. That of an outer name depends on whether the function of this scope is called."""
        if name in self.global_names:
            # What is assigned has the names of the function, and is looked up in the module.
            reason = f"{name} is assigned in a function"
            binding = replace(binding, unconditional=False, value=None, reason=reason)
            self.module.bindings.setdefault(name, []).append(binding)
        elif name in self.nonlocal_names:
            reason = f"{name} is assigned in an inner function"
            for scope in [*self._outer()][:-1]:
                # The text does not settle which of them has the name before the whole text is read.
                scope.bindings.setdefault(name, []).append(Binding(binding.line, False, reason=reason))
        else:
            self.bindings.setdefault(name, []).append(binding)

    def bind_in_function(self, name: str, binding: Binding) -> None:
        """Bind a name where ``:=`` does: outside of comprehensions."""
        scope = self
        while scope.of_comprehension and scope.parent is not None:
            scope = scope.parent
        scope.bind(name, binding)

    def _outer(self) -> Iterator[Scope]:
        scope = self.parent
        while scope is not None:
            yield scope
            scope = scope.parent

    def owner(self, name: str) -> Scope | None:
        """Return the scope that binds ``name`` as it is read in this scope, or None if the file does not bind it."""
        if name in self.global_names:
            return self.module if name in self.module.bindings else None
        for scope in (self, *self._outer()):
            if name in scope.global_names and scope is not self:
                return self.module if name in self.module.bindings else None
            if name in scope.bindings and (scope is self or not scope.of_class):
                return scope
        return None

    def find(self, name: str, line: int) -> BoundName | None:
        """Return what ``name`` is bound to at ``line`` of this scope, or None if the file does not bind it."""
        scope = self.owner(name)
        if scope is None:
            return None
        self.module.budget.spend(1 + len(scope.bindings[name]))
        return BoundName(_choose(name, scope, line if scope is self else None), scope)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A node of the script, with what is around it. ``unconditional``: it runs once whenever its scope does.

    ``statement`` is the one that the node is a part of.
    """

    node: ast.AST
    parent: Place | None
    scope: Scope
    unconditional: bool
    statement: Place = field(init=False)

    def __post_init__(self) -> None:
        is_part = self.parent is not None and not isinstance(self.node, ast.stmt)
        object.__setattr__(self, "statement", self.parent.statement if is_part and self.parent is not None else self)

    @property
    def line(self) -> int:
        """The first line of the statement."""
        return getattr(self.statement.node, "lineno", 0)


class BoundName(NamedTuple):
    """The binding of a name or an attribute, and the scope that has it."""

    binding: Binding
    scope: Scope

    def value(self) -> ScopedExpression | None:
        """Return the expression that is assigned, if there is one."""
        binding = self.binding
        if binding.value is None:
            return None
        if binding.argument_at is not None:
            return ScopedExpression(binding.value, binding.argument_at.scope, binding.argument_at.line)
        return ScopedExpression(binding.value, self.scope, binding.line)

    def values(self) -> list[ScopedExpression] | None:
        """Return the expressions that may be assigned, or None if the text does not have them all."""
        values = [BoundName(binding, self.scope).value() for binding in self.binding.one_of]
        known = [value for value in values if value is not None]
        return known if known and len(known) == len(values) else None

    def whole(self) -> ScopedExpression | None:
        """Return the expression whose value the assigned value is a part of, if there is one."""
        part_of = self.binding.part_of
        return ScopedExpression(part_of, self.scope, self.binding.line) if part_of is not None else None


@dataclass(frozen=True, slots=True)
class ScopedExpression:
    """An expression, with the scope and the line at which its names are looked up."""

    node: ast.expr
    scope: Scope
    line: int

    def with_node(self, node: ast.expr) -> ScopedExpression:
        """Return another expression whose names are looked up at the same place."""
        return ScopedExpression(node, self.scope, self.line)

    def find(self, name: ast.Name) -> BoundName | None:
        """Return what a name in this expression is bound to, or None if the file does not bind it."""
        return self.scope.find(name.id, self.line)

    @property
    def budget(self) -> Budget:
        """The steps that are left to the script."""
        return self.scope.module.budget


Unpacked = tuple[dict[str, ScopedExpression], "Argument | None"]
"""The arguments by their names, and the unknown one that stands for all others, if there may be more."""


def _choose(name: str, scope: Scope, line: int | None) -> Binding:
    """Return the binding that holds at ``line``, if the text settles that.

    ``line`` is None if the name is used in an inner scope: the text does not tell when a function is called. In a loop
    a later line comes before, too.
    """
    bindings = scope.bindings[name]
    if len(bindings) == 1:
        return bindings[0]
    imports = [binding for binding in bindings if binding.dotted]
    if len(imports) == len(bindings):  # try: from trl import ... except ImportError: from trl.experimental import ...
        return next((binding for binding in imports if binding.dotted.split(".")[0] == "trl"), imports[-1])
    before = [binding for binding in bindings if line is not None and binding.line < line]
    after = [binding for binding in bindings if line is None or binding.line >= line]
    loops = [loop for loop in scope.loops if line in loop]
    comes_again = any(binding.line in loop for binding in after for loop in loops)
    if before and all(binding.unconditional for binding in before) and not comes_again:
        return before[-1]
    lines = ", ".join(str(binding.line) for binding in bindings[:5])
    reason = f"{name} is assigned more than once (lines {lines})"
    return Binding(bindings[-1].line, False, reason=reason, one_of=tuple(bindings))


def called_name(function: ast.expr) -> str:
    """Return ``a.b.c``, or ``(...).b.c`` if that is an attribute of something without a name."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    return ".".join([function.id if isinstance(function, ast.Name) else "(...)", *reversed(names)])


def source_text(node: ast.AST | None) -> str:
    """Return a piece of the script on one line, shortened to 60 characters."""
    if node is None:
        return ""
    if _is_long(node):
        return f"{source_text(node.func)}(...)" if isinstance(node, ast.Call) else "a long expression"
    text = " ".join(ast.unparse(node).split())
    return plain(text if len(text) <= 60 else f"{text[:57]}...")


def _is_long(node: ast.AST) -> bool:
    """Return whether an expression has so many parts that to write them takes time."""
    parts, count = [node], 0
    while parts:
        part = parts.pop()
        count += 1
        if count > _MOST_PARTS_OF_TEXT or (isinstance(part, ast.Constant) and not _is_short(part.value)):
            return True
        parts += ast.iter_child_nodes(part)
    return False


def _is_short(value: object) -> bool:
    if isinstance(value, (str, bytes)):
        return len(value) <= 1_000
    return not isinstance(value, int) or value.bit_length() <= 1_000
