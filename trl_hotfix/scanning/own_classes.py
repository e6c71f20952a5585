"""The dataclasses of a script that transformers' parser fills, and the parts of the objects that it makes."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .names import classes, constructor, parsed_classes
from .origins import Evaluate
from .scopes import ScopedExpression, called_name, source_text
from .uses import changes_of

_TEXTS = frozenset(["str", "Optional[str]", "str | None", "'str'"])

Fields = Mapping[str, tuple[ast.AnnAssign, ScopedExpression]]
"""The fields by their names, each with the class's place in the script."""


def own_fields(parsed: Sequence[ScopedExpression]) -> Fields | None:
    """Return the fields of classes that the script has in full; None if one derives from a class of a library."""
    fields: dict[str, tuple[ast.AnnAssign, ScopedExpression]] = {}
    for function in parsed:
        bases = list(classes(function))
        if not bases or any(definition is None and name != "object" for name, definition in bases):
            return None
        fields |= fields_of(function)
    return fields


def fields_of(function: ScopedExpression) -> Fields:
    """Return the fields of a class and its bases, as far as the script has them."""
    fields: dict[str, tuple[ast.AnnAssign, ScopedExpression]] = {}
    for _, definition in classes(function):
        for node in function.budget.counted(definition.body if definition is not None else ()):
            if definition is not None and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                place = ScopedExpression(node.annotation, function.scope.module.inner[definition], node.lineno)
                fields.setdefault(node.target.id, (node, place))
    return fields


def parsed_part(expression: ScopedExpression, evaluate: Evaluate) -> Argument | None:
    """Return ``script_args.beta``, if a known command line fills ``script_args``; None if the text lacks it."""
    node, command_line = expression.node, expression.scope.module.command_line
    if not isinstance(node, ast.Attribute) or command_line is None:
        return None
    owner = expression.with_node(node.value)
    parsed = parsed_classes(owner)
    if parsed is None or changes_of(owner).changes or any(map(_changes_itself, parsed)):
        return None
    found = [fields[node.attr] for function in parsed if node.attr in (fields := fields_of(function))]
    if node.attr in command_line.values:
        annotation = source_text(found[0][0].annotation) if found else ""
        return _typed(replace(command_line.values[node.attr], line=node.lineno), annotation, source_text(node))
    short = command_line.may_set(node.attr, [name for function in parsed for name in fields_of(function)])
    if short is not None:
        return replace(short, line=node.lineno)
    if len(found) != 1:
        return None
    field, place = found[0]
    default = _default(field)
    return evaluate(place.with_node(default)) if default is not None else None


def _typed(value: Argument, annotation: str, text: str) -> Argument:
    """Return what the parser makes of a word for a field with this annotation."""
    if annotation not in (*_TEXTS, "bool"):
        return value
    kind = bool if annotation == "bool" else str
    typed = next((one for one in (value, *value.alternatives) if isinstance(one.value, kind)), None)
    if typed is not None:
        return replace(typed, line=value.line, place=value.place)
    # The words "1" and "true" stay text.
    return value if kind is bool else Argument(Kind.UNKNOWN, line=value.line, reason=f"{text} is text")


def _changes_itself(function: ScopedExpression) -> bool:
    return any(definition is not None and constructor(definition) is not None for _, definition in classes(function))


def _default(field: ast.AnnAssign) -> ast.expr | None:
    """Return ``x`` of ``beta: float = x``, or of ``beta: float = field(default=x)``."""
    value = field.value
    if isinstance(value, ast.Call) and called_name(value.func).rpartition(".")[2] == "field":
        return next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    return value
