"""What an expression of a script evaluates to, as far as the text tells: an ``Argument``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .budget import TooLargeError, literal, too_large
from .command_lines import ToldConstant
from .model_config import made_of_model_config, text_of_model_config
from .names import METHODS_RETURNING_MODEL, classes, dotted_name, follow
from .own_classes import parsed_part
from .scopes import COMPREHENSIONS, Scope, ScopedExpression, Unpacked, called_name, source_text
from .told_commands import told_parameter
from .told_parts import told_names, told_part
from .told_settings import told_keys, told_setting
from .uses import changes_of, known_value

_LIBRARIES = ("datasets.", "peft.", "torch.", "transformers.")
_BUILTINS = frozenset(["bool", "dict", "float", "int", "len", "list", "range", "set", "str", "tuple"])
_MAX_DEPTH = 40
_MAX_ELEMENTS = 40
_MAX_ALTERNATIVES = 4
_MAX_MAKERS = 200
_STEPS_OF_TEXT = 10
"""To write a piece of the script takes so much longer than to look at it."""

_ARITHMETIC: dict[type[ast.operator | ast.unaryop], Callable[..., Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
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
    expression.budget.spend()
    if expression not in values:
        line = expression.node.lineno
        values[expression] = Argument(Kind.UNKNOWN, line=line, reason="it depends on itself")
        try:
            values[expression] = _evaluated(expression, depth)
        except (TooLargeError, RecursionError):
            values[expression] = too_large(line)
            raise
    return values[expression]


def _evaluated(expression: ScopedExpression, depth: int) -> Argument:
    node = expression.node
    line = node.lineno
    if depth > _MAX_DEPTH:
        return Argument(Kind.UNKNOWN, line=line, reason="it is nested too deeply")
    if isinstance(node, ast.Constant):
        return replace(node.argument, line=line) if isinstance(node, ToldConstant) else literal(node.value, line)
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
        return _one_of(values, _unknown(expression), depth)
    told = told_part(expression, value_of) or told_parameter(expression, value_of) or told_setting(expression, value_of)
    if told is not None:
        return told
    if isinstance(node, ast.Call):
        return _called(node, expression, depth)
    parsed = parsed_part(expression, value_of) or text_of_model_config(expression)
    if parsed is not None:
        return parsed
    dotted = dotted_name(expression) if isinstance(node, ast.Attribute) else None
    if dotted is not None and dotted.startswith("torch."):
        return Argument(Kind.LITERAL, dotted.rpartition(".")[2], line)
    if isinstance(node, ast.Subscript):
        owner = value_of(expression.with_node(node.value), depth + 1)
        if _is_dataset(owner):
            return Argument(Kind.OBJECT, line=line, made_by=owner.made_by)
    return _unknown(expression)


def _unknown(expression: ScopedExpression) -> Argument:
    expression.budget.spend(_STEPS_OF_TEXT)
    return Argument(Kind.UNKNOWN, line=expression.node.lineno, reason=source_text(expression.node))


def _computed(node: ast.UnaryOp | ast.BinOp, expression: ScopedExpression, depth: int) -> Argument:
    operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    values = [value_of(expression.with_node(operand), depth + 1) for operand in operands]
    numbers = [value.value for value in values if value.kind is Kind.LITERAL and isinstance(value.value, (int, float))]
    compute = _ARITHMETIC.get(type(node.op))
    if len(numbers) < len(values) or compute is None:
        return _unknown(expression)
    try:
        return literal(compute(*numbers), node.lineno)
    except (ArithmeticError, ValueError):
        return _unknown(expression)


def _collection(elements: list[ScopedExpression], line: int, depth: int) -> Argument:
    """Return a list of literals; or an object made by whatever makes the elements."""
    values = [value_of(element, depth + 1) for element in elements[:_MAX_ELEMENTS]]
    truncated = len(elements) > _MAX_ELEMENTS
    if not truncated and all(value.kind is Kind.LITERAL for value in values):
        return literal([value.value for value in values], line)
    complete = not truncated and all(value.kind is not Kind.UNKNOWN and value.complete for value in values)
    made_by = tuple(name for value in values for name in value.made_by)
    # Lists within lists have more names with each level.
    complete = complete and len(made_by) <= _MAX_MAKERS
    return Argument(Kind.OBJECT, line=line, made_by=made_by[:_MAX_MAKERS], complete=complete)


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
    if binding.parameter_of is not None:
        told = told_parameter(expression, value_of)
        if told is not None:
            return told
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
    made = made_of_model_config(expression)
    if made is not None:
        return made
    if names and (_makes_object(names) or names[0].startswith(_LIBRARIES) or names[0] in _BUILTINS):
        return Argument(Kind.OBJECT, line=line, made_by=names)
    if isinstance(node.func, ast.Attribute) and dotted_name(function) is None:
        owner = value_of(expression.with_node(node.func.value), depth + 1)
        if _is_dataset(owner):
            return Argument(Kind.OBJECT, line=line, made_by=owner.made_by)
    return Argument(Kind.UNKNOWN, line=line, reason=f"what {source_text(node.func)}() returns is not in the text")


def _makes_object(names: tuple[str, ...]) -> bool:
    """Is it a class, or a constructor such as ``Model.from_pretrained``? Another method may return None.

    ``names`` has the class and its base classes.
    """
    return any(name.rpartition(".")[2][:1].isupper() for name in names) or (
        names[0].rpartition(".")[2].startswith("from_") and any(part[:1].isupper() for part in names[0].split("."))
    )


def _is_dataset(argument: Argument) -> bool:
    return any(name.startswith("datasets.") for name in argument.made_by)


def keyword_arguments(call: ast.Call, scope: Scope, line: int) -> Unpacked:
    """Return the keywords of a call, with those of ``**{...}``.

    The second value is the unknown argument that stands for any other name, if ``**options`` may set more.
    """
    arguments: dict[str, ScopedExpression] = {}
    unknown = None
    for keyword in scope.module.budget.counted(call.keywords):
        expression = ScopedExpression(keyword.value, scope, line)
        if keyword.arg is not None:
            arguments[keyword.arg] = expression
            continue
        unpacked, unknown_too = _unpacked(expression)
        scope.module.budget.spend(len(unpacked))
        arguments.update(unpacked)
        unknown = unknown or unknown_too
    return arguments, unknown


def _unpacked(expression: ScopedExpression) -> Unpacked:
    """Return the arguments that ``**expression`` gives, in the same form. Each is read once."""
    known = expression.scope.module.unpacked
    if expression not in known:
        known[expression] = _read_unpacked(expression)
    return known[expression]


def _read_unpacked(expression: ScopedExpression) -> Unpacked:
    options = follow(expression)
    node = options.node
    arguments: dict[str, ScopedExpression] = {}
    unknown = None
    reason = f"**{source_text(expression.node)} may set it"
    if isinstance(node, ast.Call) and called_name(node.func) == "dict" and not node.args:
        arguments, unknown = keyword_arguments(node, options.scope, options.line)
    elif isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        for constant, value in expression.budget.counted(zip(node.keys, node.values, strict=True)):
            arguments[str(getattr(constant, "value", ""))] = options.with_node(value)
    else:
        names = told_names(expression, value_of)
        names = told_keys(expression, value_of) if names is None else names
        if isinstance(names, Argument):
            return {}, names
        unknown = Argument(Kind.UNKNOWN, line=expression.node.lineno, reason=reason) if names is None else None
        for name in expression.budget.counted(names or ()):
            part = ast.Subscript(expression.node, ast.Constant(name), ast.Load())
            arguments[name] = expression.with_node(ast.copy_location(part, expression.node))
    changes = changes_of(expression)
    uncertain = changes.of_any()
    for key, of_key in changes.by_part().items():
        set_by = [change for change in of_key if change.inner_part is None]
        argument = known_value(set_by, expression.scope, expression.line) if set_by else arguments.get(key)
        if argument is not None:
            arguments[key] = argument
        elif set_by and isinstance(set_by[-1].place.node, ast.Subscript):
            # What `options["key"]` is at the end is not known, and no other key is touched.
            arguments[key] = expression.with_node(set_by[-1].place.node)
        else:
            uncertain = uncertain or of_key[-1]
    if uncertain is not None:
        # What may be set again is not known, though it is named.
        return {}, Argument(Kind.UNKNOWN, line=uncertain.line, reason=uncertain.reason)
    return arguments, unknown
