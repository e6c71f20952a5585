"""What an expression of a script evaluates to, as far as the text tells: an ``Argument``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .names import METHODS_RETURNING_MODEL, classes, dotted_name, follow, parsed_classes
from .scopes import COMPREHENSIONS, Scope, ScopedExpression, source_text
from .uses import changes_of, known_value

_LIBRARIES = ("datasets.", "peft.", "torch.", "transformers.")
_BUILTINS = frozenset(["bool", "dict", "float", "int", "len", "list", "range", "set", "str", "tuple"])
_MAX_DEPTH = 40
_MAX_ELEMENTS = 40
_MAX_ALTERNATIVES = 4
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def value_of(expression: ScopedExpression, depth: int = 0) -> Argument:
    """Return what the expression evaluates to; ``Kind.UNKNOWN`` with the reason if the text does not tell.

    Each is evaluated once: names that are assigned to one another in a loop have more ways than can be followed.
    """
    values = expression.scope.module.values
    if expression not in values:
        line = expression.node.lineno
        values[expression] = Argument(Kind.UNKNOWN, line=line, reason="it depends on itself")
        values[expression] = _evaluated(expression, depth)
    return values[expression]


def _evaluated(expression: ScopedExpression, depth: int) -> Argument:
    node = expression.node
    line = node.lineno
    if depth > _MAX_DEPTH:
        return Argument(Kind.UNKNOWN, line=line, reason="it is nested too deeply")
    if isinstance(node, ast.Constant):
        return Argument(Kind.LITERAL, node.value, line)
    if isinstance(node, (ast.UnaryOp, ast.BinOp)):
        return _computed(node, expression, depth)
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return _collection([expression.with_node(element) for element in node.elts], line, depth)
    if isinstance(node, ast.Dict):
        return Argument(Kind.OBJECT, line=line, made_by=("dict",))
    if isinstance(node, ast.JoinedStr):
        return Argument(Kind.OBJECT, line=line, made_by=("str",))
    if isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
        return Argument(Kind.OBJECT, line=line, complete=False)
    if isinstance(node, ast.Name):
        return _named(node, expression, depth)
    if isinstance(node, ast.IfExp):
        values = [expression.with_node(node.body), expression.with_node(node.orelse)]
        return _one_of(values, Argument(Kind.UNKNOWN, line=line, reason=source_text(node)), depth)
    if isinstance(node, ast.Call):
        return _called(node, expression, depth)
    command_line = expression.scope.module.command_line
    if isinstance(node, ast.Attribute) and command_line is not None and node.attr in command_line.values:
        changes = changes_of(expression.with_node(node.value))
        if parsed_classes(expression.with_node(node.value)) is not None and not changes.changes:
            return Argument(Kind.LITERAL, command_line.values[node.attr], line)
    dotted = dotted_name(expression) if isinstance(node, ast.Attribute) else None
    if dotted is not None and dotted.startswith("torch."):
        return Argument(Kind.LITERAL, dotted.rpartition(".")[2], line)
    if isinstance(node, ast.Subscript):
        owner = value_of(expression.with_node(node.value), depth + 1)
        if _is_dataset(owner):
            return Argument(Kind.OBJECT, line=line, made_by=owner.made_by)
    return Argument(Kind.UNKNOWN, line=line, reason=source_text(node))


def _computed(node: ast.UnaryOp | ast.BinOp, expression: ScopedExpression, depth: int) -> Argument:
    operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    values = [value_of(expression.with_node(operand), depth + 1) for operand in operands]
    numbers = [value.value for value in values if value.kind is Kind.LITERAL and isinstance(value.value, (int, float))]
    unknown = Argument(Kind.UNKNOWN, line=node.lineno, reason=source_text(node))
    if len(numbers) < len(values):
        return unknown
    try:
        if isinstance(node, ast.BinOp):
            compute = _ARITHMETIC.get(type(node.op))
            return Argument(Kind.LITERAL, compute(*numbers), node.lineno) if compute is not None else unknown
        if isinstance(node.op, ast.Not):
            return Argument(Kind.LITERAL, not numbers[0], node.lineno)
        if isinstance(node.op, ast.USub):
            return Argument(Kind.LITERAL, -numbers[0], node.lineno)
    except (ArithmeticError, ValueError):
        return unknown
    return unknown


def _collection(elements: list[ScopedExpression], line: int, depth: int) -> Argument:
    """Return a list of literals; or an object made by whatever makes the elements."""
    values = [value_of(element, depth + 1) for element in elements[:_MAX_ELEMENTS]]
    truncated = len(elements) > _MAX_ELEMENTS
    if not truncated and all(value.kind is Kind.LITERAL for value in values):
        return Argument(Kind.LITERAL, [value.value for value in values], line)
    complete = not truncated and all(value.kind is not Kind.UNKNOWN and value.complete for value in values)
    made_by = tuple(name for value in values for name in value.made_by)
    return Argument(Kind.OBJECT, line=line, made_by=made_by, complete=complete)


def _named(node: ast.Name, expression: ScopedExpression, depth: int) -> Argument:
    bound = expression.find(node)
    if bound is None:
        return Argument(Kind.UNKNOWN, line=node.lineno, reason=f"{node.id} is not assigned in this file")
    binding, value = bound.binding, bound.value()
    if value is not None:
        argument = value_of(value, depth + 1)
        if argument.kind is not Kind.UNKNOWN and isinstance(follow(value).node, (ast.List, ast.Set)):
            change = next((change for change in changes_of(expression).changes if change.inner_part is None), None)
            if change is not None:
                return Argument(Kind.UNKNOWN, line=change.line, reason=change.reason)
        return argument
    if binding.definition is not None:
        return Argument(Kind.OBJECT, line=node.lineno, made_by=(node.id,))
    if binding.dotted:
        return Argument(Kind.UNKNOWN, line=node.lineno, reason=f"{node.id} is imported ({binding.dotted})")
    unknown = Argument(Kind.UNKNOWN, line=binding.line, reason=binding.reason)
    values = bound.values()
    return _one_of(values, unknown, depth) if values is not None else unknown


def _one_of(values: list[ScopedExpression], unknown: Argument, depth: int) -> Argument:
    """Return ``unknown`` with what it may be, if each of the values is known, and none can be changed in place."""
    if len(values) > _MAX_ALTERNATIVES or any(isinstance(follow(value).node, (ast.List, ast.Set)) for value in values):
        return unknown
    arguments = [value_of(value, depth + 1) for value in values]
    if any(argument.kind is Kind.UNKNOWN or isinstance(argument.value, list) for argument in arguments):
        return unknown
    return replace(unknown, alternatives=tuple(arguments))


def _called(node: ast.Call, expression: ScopedExpression, depth: int) -> Argument:
    """Return an object if the call is of a class or of a known library; what other functions return is unknown."""
    line = node.lineno
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS_RETURNING_MODEL:
        return value_of(expression.with_node(node.func.value), depth + 1)
    function = expression.with_node(node.func)
    names = tuple(name for name, _ in classes(function))
    by_command_line = _made_by_command_line(names[0] if names else "", expression)
    if by_command_line is not None:
        return by_command_line
    has_class = any(part[:1].isupper() for name in names for part in name.split("."))
    if names and (has_class or names[0].startswith(_LIBRARIES) or names[0] in _BUILTINS):
        return Argument(Kind.OBJECT, line=line, made_by=names)
    if isinstance(node.func, ast.Attribute) and dotted_name(function) is None:
        owner = value_of(expression.with_node(node.func.value), depth + 1)
        if _is_dataset(owner):
            return Argument(Kind.OBJECT, line=line, made_by=owner.made_by)
    return Argument(Kind.UNKNOWN, line=line, reason=f"what {source_text(node.func)}() returns is not in the text")


_MADE_BY_COMMAND_LINE = {
    "trl.get_peft_config": (("use_peft",), "peft.LoraConfig"),
    "trl.get_quantization_config": (("load_in_4bit", "load_in_8bit"), "transformers.BitsAndBytesConfig"),
}
"""Functions of TRL that return an object if one of these arguments is on, and None otherwise."""


def _made_by_command_line(function: str, expression: ScopedExpression) -> Argument | None:
    """Return what ``get_peft_config(model_args)`` returns, if the command line is told."""
    command_line = expression.scope.module.command_line
    call = expression.node
    if command_line is None or function not in _MADE_BY_COMMAND_LINE or not isinstance(call, ast.Call):
        return None
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if len(given) != 1 or parsed_classes(expression.with_node(given[0])) is None:
        return None
    if changes_of(expression.with_node(given[0])).changes:
        return None
    switches, made_by = _MADE_BY_COMMAND_LINE[function]
    if any(command_line.values.get(name) for name in switches):
        return Argument(Kind.OBJECT, line=call.lineno, made_by=(made_by,))
    return Argument(Kind.LITERAL, None, call.lineno)


def _is_dataset(argument: Argument) -> bool:
    return any(name.startswith("datasets.") for name in argument.made_by)


def keyword_arguments(call: ast.Call, scope: Scope, line: int) -> tuple[dict[str, ScopedExpression], Argument | None]:
    """Return the keywords of a call, with those of ``**{...}``.

    The second value is the unknown argument that stands for any other name, if ``**options`` may set more.
    """
    arguments: dict[str, ScopedExpression] = {}
    unknown = None
    for keyword in call.keywords:
        expression = ScopedExpression(keyword.value, scope, line)
        if keyword.arg is not None:
            arguments[keyword.arg] = expression
            continue
        unpacked, unknown_too = _unpacked(expression)
        arguments.update(unpacked)
        unknown = unknown or unknown_too
    return arguments, unknown


def _unpacked(expression: ScopedExpression) -> tuple[dict[str, ScopedExpression], Argument | None]:
    """Return the arguments that ``**expression`` gives, in the same form."""
    options = follow(expression)
    node = options.node
    arguments: dict[str, ScopedExpression] = {}
    unknown = None
    reason = f"**{source_text(expression.node)} may set it"
    if isinstance(node, ast.Call) and source_text(node.func) == "dict" and not node.args:
        arguments, unknown = keyword_arguments(node, options.scope, options.line)
    elif isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        for constant, value in zip(node.keys, node.values, strict=True):
            arguments[str(getattr(constant, "value", ""))] = options.with_node(value)
    else:
        unknown = Argument(Kind.UNKNOWN, line=expression.node.lineno, reason=reason)
    changes = changes_of(expression)
    uncertain = changes.of_any()
    for key in dict.fromkeys(change.part for change in changes.changes if change.part is not None):
        set_by = [change for change in changes.of(key) if change.inner_part is None]
        argument = known_value(set_by, expression.scope, expression.line) if set_by else arguments.get(key)
        if argument is not None:
            arguments[key] = argument
        elif set_by and isinstance(set_by[-1].place.node, ast.Subscript):
            # What `options["key"]` is at the end is not known, and no other key is touched.
            arguments[key] = expression.with_node(set_by[-1].place.node)
        else:
            uncertain = uncertain or changes.of(key)[-1]
    if uncertain is not None:
        # What may be set again is not known, though it is named.
        return {}, Argument(Kind.UNKNOWN, line=uncertain.line, reason=uncertain.reason)
    return arguments, unknown
