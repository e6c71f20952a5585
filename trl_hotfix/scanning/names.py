"""What a name in a script refers to: an assigned expression, an import under its dotted name, or a class."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .scopes import ScopedExpression

METHODS_RETURNING_MODEL = frozenset(
    ["bfloat16", "cpu", "cuda", "eval", "float", "half", "requires_grad_", "to", "train"]
)
"""Methods of a model that return the model."""

_MAX_STEPS = 40


def follow(expression: ScopedExpression) -> ScopedExpression:
    """Follow a name to the expression that is assigned to it in the end, and ``model.to(...)`` to the model."""
    for _ in range(_MAX_STEPS):
        node = expression.node
        if isinstance(node, ast.Name):
            bound = expression.find(node)
            value = bound.value() if bound is not None else None
            if value is None:
                return expression
            expression = value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS_RETURNING_MODEL
        ):
            expression = expression.with_node(node.func.value)
        else:
            return expression
    return expression


def dotted_name(expression: ScopedExpression) -> str | None:
    """Return ``a.b.c`` with the name that ``a`` was imported by; None if ``a`` is no module, class or function."""
    root, attributes = _split_attributes(expression.node)
    if not isinstance(root, ast.Name):
        return None
    name = _root_name(root, expression)
    return ".".join([name, *attributes]) if name is not None else None


def _root_name(root: ast.Name, expression: ScopedExpression) -> str | None:
    bound = expression.find(root)
    if bound is None:
        starred = expression.scope.module.star_imports
        return f"trl.{root.id}" if "trl" in starred and root.id.endswith(("Config", "Trainer")) else root.id
    if bound.binding.dotted:
        return bound.binding.dotted
    if bound.binding.definition is not None:
        return root.id
    value = bound.value()
    if value is None or not isinstance(value.node, (ast.Name, ast.Attribute)) or value.node is root:
        return None
    return _imported_name(value)


def _imported_name(expression: ScopedExpression) -> str | None:
    """Return the dotted name in ``T = trl.DPOTrainer``. An alias of an alias is not followed, so that this ends."""
    root, attributes = _split_attributes(expression.node)
    bound = expression.find(root) if isinstance(root, ast.Name) else None
    return ".".join([bound.binding.dotted, *attributes]) if bound is not None and bound.binding.dotted else None


def _split_attributes(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """Split ``a.b.c`` into ``a`` and ``["b", "c"]``."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return node, attributes[::-1]


def classes(expression: ScopedExpression) -> Iterator[tuple[str, ast.ClassDef | None]]:
    """Yield the class that ``expression`` names, then its base classes.

    Each comes with its dotted name, and with its definition if the script has it.
    """
    visited: set[ast.AST] = set()
    queue = [expression]
    while queue:
        expression = queue.pop(0)
        node = expression.node
        while isinstance(node, ast.Subscript):
            node = node.value
        dotted = dotted_name(expression.with_node(node))
        bound = expression.find(node) if isinstance(node, ast.Name) else None
        definition = bound.binding.definition if bound is not None else None
        if dotted is None or (definition is not None and definition in visited):
            continue
        if isinstance(definition, ast.ClassDef) and bound is not None:
            visited.add(definition)
            yield dotted, definition
            queue.extend(ScopedExpression(base, bound.scope, definition.lineno) for base in definition.bases)
        elif definition is None:
            yield dotted, None


_PARSERS = ("transformers.HfArgumentParser", "trl.HfArgumentParser", "trl.TrlParser")
_PARSING = ("parse_args_and_config", "parse_args_into_dataclasses")


def parsed_classes(expression: ScopedExpression) -> list[ScopedExpression] | None:
    """Return the classes that the command line is parsed into, if the expression is one of the parsed objects."""
    call = _parsing_call(follow(expression))
    if call is None:
        return None
    maker = follow(call)
    if not isinstance(maker.node, ast.Call) or dotted_name(maker.with_node(maker.node.func)) not in _PARSERS:
        return None
    given = [*maker.node.args, *(keyword.value for keyword in maker.node.keywords if keyword.arg == "dataclass_types")]
    listed = follow(maker.with_node(given[0])) if given else None
    if listed is None:
        return None
    elements = listed.node.elts if isinstance(listed.node, (ast.List, ast.Tuple)) else [listed.node]
    return [listed.with_node(element) for element in elements]


def _parsing_call(expression: ScopedExpression) -> ScopedExpression | None:
    """Return ``parser`` in ``parser.parse_args_and_config()`` if the expression is a part of what that returns."""
    node = expression.node
    if isinstance(node, ast.Name):
        bound = expression.find(node)
        whole = bound.whole() if bound is not None else None
        return _parsing_call(whole) if whole is not None else None
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PARSING:
        return expression.with_node(node.func.value)
    return None


def trainer_names(expression: ScopedExpression) -> list[str]:
    """Return the dotted names of TRL's trainers among a class and its base classes."""
    return [name for name, _ in classes(expression) if _is_trainer(name)]


def makes_trainer(function: ScopedExpression) -> bool:
    """Is the function a trainer's class of TRL, or one that the script derives from it without a constructor?"""
    bases = list(classes(function))
    own = [definition for _, definition in bases if definition is not None]
    return any(_is_trainer(name) for name, _ in bases) and not any(map(constructor, own))


def _is_trainer(dotted: str) -> bool:
    package, _, name = dotted.rpartition(".")
    return package.split(".")[0] == "trl" and name.endswith("Trainer") and name != "Trainer"


def constructor(definition: ast.ClassDef) -> ast.FunctionDef | None:
    """Return the constructor that a class of the script has, if it has one."""
    methods = [node for node in definition.body if isinstance(node, ast.FunctionDef)]
    return next((method for method in methods if method.name in ("__init__", "__new__", "__post_init__")), None)
