"""What a parameter of a typer command takes: ``float``, ``Optional[int]``, ``list[str]``, an enumeration."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from ..catalogue.conditions import Argument, Kind
from ..errors import plain
from .names import dotted_name, follow
from .parser_texts import UnclearError
from .scopes import ScopedExpression, source_text

_ONE_WORD = frozenset(["datetime.datetime", "pathlib.Path", "uuid.UUID"])
"""Types that are made of one word."""

_OPTIONAL = ("Optional", "typing.Optional", "Union", "typing.Union")
_LISTS = ("List", "list", "typing.List")
_LITERALS = ("typing.Literal", "typing_extensions.Literal")
_ENUMS = ("enum.Enum", "enum.StrEnum")


class Taken(NamedTuple):
    """What a parameter takes. ``word``: the type that click makes of one. ``scalar``: that of Python, if it has a
    literal. ``members``: the values of an enumeration by their names; ``is_text``: its members are texts, too.
    """

    word: Any
    scalar: type | None = None
    is_list: bool = False
    members: Mapping[str, str] = {}
    is_text: bool = True
    enumeration: ast.ClassDef | None = None


class Whole(click.IntRange):
    """A whole number. Some releases of typer take "2.0" for one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not _is(int, value) and _is(float, value):
            raise UnclearError(f"releases of typer differ in what they make of {plain(str(value))}")
        return super().convert(value, param, ctx)


def _is(number: type, word: Any) -> bool:
    try:
        number(word)
    except ValueError:
        return False
    return True


class Other(NamedTuple):
    """What a type makes of a word, where the text does not show it."""

    argument: Argument


def taken(annotation: ScopedExpression) -> Taken:
    """Read an annotation. Raises ``UnclearError`` for one that typer may read in another way."""
    annotation.budget.spend()
    node = annotation.node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _one_of([annotation.with_node(node.left), annotation.with_node(node.right)], annotation)
    if isinstance(node, ast.Subscript):
        return _of_subscript(node, annotation)
    dotted = dotted_name(annotation)
    if dotted in ("bool", "float", "int", "str") and annotation.find(_name(node)) is None:
        return scalar({"bool": bool, "float": float, "int": int, "str": str}[dotted])
    if dotted in _ONE_WORD:
        return Taken(_other(source_text(node), node.lineno))
    aim = follow(annotation)
    definition = defined_by(aim)
    if isinstance(definition, ast.ClassDef):
        return _enumeration(definition, aim)
    if aim.node is not node:
        return taken(aim)
    raise _unread(annotation)


def scalar(of: type) -> Taken:
    """Return what a parameter of a type of Python takes."""
    return Taken({bool: click.BOOL, float: click.FLOAT, int: Whole(), str: click.STRING}[of], of)


def defined_by(expression: ScopedExpression) -> ast.AST | None:
    """Return the class or function of the script that a name names."""
    bound = expression.find(expression.node) if isinstance(expression.node, ast.Name) else None
    return bound.binding.definition if bound is not None else None


def _name(node: ast.expr) -> ast.Name:
    assert isinstance(node, ast.Name)
    return node


def _of_subscript(node: ast.Subscript, annotation: ScopedExpression) -> Taken:
    dotted = dotted_name(annotation.with_node(node.value))
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    within = [annotation.with_node(part) for part in parts]
    if dotted in _OPTIONAL:
        return _one_of(within, annotation)
    if dotted in _LISTS and len(within) == 1:
        element = taken(within[0])
        if not element.is_list and not element.members and element.scalar is not bool:
            return element._replace(is_list=True)
    if dotted in _LITERALS:
        words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        if len(words) == len(parts):
            return Taken(click.Choice(words), str)
    raise _unread(annotation)


def _one_of(parts: list[ScopedExpression], annotation: ScopedExpression) -> Taken:
    """Read ``Optional[float]``, ``Union[float, None]`` or ``float | None``."""
    others = [part for part in parts if not (isinstance(part.node, ast.Constant) and part.node.value is None)]
    if len(others) != 1:
        raise _unread(annotation)
    return taken(others[0])


def _enumeration(definition: ast.ClassDef, annotation: ScopedExpression) -> Taken:
    """Read ``class Loss(str, Enum)`` whose members are texts."""
    module = annotation.scope.module
    bases = [dotted_name(ScopedExpression(base, module, definition.lineno)) for base in definition.bases]
    members: dict[str, str] = {}
    for node in annotation.budget.counted(definition.body):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        value = node.value if isinstance(node, (ast.Assign, ast.Expr)) else None
        text = value.value if isinstance(value, ast.Constant) else None
        if isinstance(target, ast.Name) and isinstance(text, str) and not target.id.startswith("_"):
            members[target.id] = text
        elif not isinstance(node, (ast.Pass, ast.Expr)):
            raise _unread(annotation)
    is_enum = bool(bases) and bases[-1] in _ENUMS and set(bases[:-1]) <= {"str"}
    if not members or not is_enum or definition.decorator_list or definition.keywords:
        raise _unread(annotation)
    is_text = "str" in bases or bases[-1] == "enum.StrEnum"
    return Taken(click.Choice(list(dict.fromkeys(members.values()))), str, False, members, is_text, definition)


def _other(type_: str, line: int) -> Any:
    def make(word: str) -> Other:
        reason = f"what {type_} makes of {plain(word)} is not in the text"
        return Other(Argument(Kind.UNKNOWN, line=line, reason=reason))

    return make


def _unread(annotation: ScopedExpression) -> UnclearError:
    node = annotation.node
    return UnclearError(f"the annotation {source_text(node)} is not read (line {node.lineno})")
