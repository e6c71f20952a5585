"""What a name in a script refers to: an assigned expression, an import under its dotted name, or a class."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator

from .scopes import ScopedExpression, called_name

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
    if value is None or value.node is root:
        return None
    if isinstance(value.node, ast.Call):
        return imported_module(value.node)
    return _imported_name(value) if isinstance(value.node, (ast.Name, ast.Attribute)) else None


def imported_module(call: ast.Call) -> str | None:
    """Return the module in ``importlib.import_module("trl")``."""
    if called_name(call.func).rpartition(".")[2] not in ("import_module", "__import__") or not call.args:
        return None
    module = call.args[0]
    return module.value if isinstance(module, ast.Constant) and isinstance(module.value, str) else None


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
    queue = deque([expression])
    while queue:
        expression = queue.popleft()
        expression.budget.spend()
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
PARSING_INTO_CLASSES = ("parse_args_and_config", "parse_args_into_dataclasses")
_OPTIONS_OF_PARSING = {"return_remaining_strings", "fail_with_unknown_args"}
_METHODS_OF_PARSERS = {*PARSING_INTO_CLASSES, "add_argument", "print_help"}


def parsed_classes(expression: ScopedExpression) -> list[ScopedExpression] | None:
    """Return the classes that the command line is parsed into, if the expression is one of the parsed objects.

    None too if the parser may have got other defaults, or other words than those of the command line.
    """
    parser = _parsing_call(follow(expression))
    makers = _makers(parser) if parser is not None else []
    listed = [types for maker in makers if (types := _listed(maker)) is not None]
    if not listed or len(listed) < len(makers) or len({types.node for types in listed}) > 1:
        return None
    (types, *_) = listed
    elements = types.node.elts if isinstance(types.node, (ast.List, ast.Tuple)) else [types.node]
    return [types.with_node(element) for element in elements]


def _parsing_call(expression: ScopedExpression) -> ScopedExpression | None:
    """Return ``parser`` in ``parser.parse_args_and_config()`` if the expression is a part of what that returns."""
    for _ in range(_MAX_STEPS):
        if not isinstance(expression.node, ast.Name):
            break
        bound = expression.find(expression.node)
        whole = bound.whole() if bound is not None else None
        if whole is None:
            return None
        expression = whole
    node = expression.node
    if isinstance(node, ast.Subscript):
        node = node.value
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or node.func.attr not in PARSING_INTO_CLASSES
    ):
        return None
    of_command_line = not node.args and {keyword.arg for keyword in node.keywords} <= _OPTIONS_OF_PARSING
    return expression.with_node(node.func.value) if of_command_line else None


def _makers(parser: ScopedExpression) -> list[ScopedExpression]:
    """Return the calls that may make a parser, directly or in a function of the script; none if it may change."""
    maker = _unchanged(parser)
    result = returned(maker) if maker is not None else None
    if result is None:
        return [maker] if maker is not None else []
    if not isinstance(result.node, ast.Name):
        return [result]
    bound = result.find(result.node)
    values = bound.values() if bound is not None else None
    if values is not None and _is_only_parsed(result, result.node):
        return values
    return [maker] if (maker := _unchanged(result)) is not None else []


def _unchanged(parser: ScopedExpression) -> ScopedExpression | None:
    """Follow the names of a parser, as long as nothing but parsing is done with it."""
    for _ in range(_MAX_STEPS):
        node = parser.node
        if not isinstance(node, ast.Name):
            return parser
        bound = parser.find(node)
        value = bound.value() if bound is not None else None
        if value is None or not _is_only_parsed(parser, node):
            return None
        parser = value
    return None


def _is_only_parsed(expression: ScopedExpression, name: ast.Name) -> bool:
    owner = expression.scope.owner(name.id)
    return owner is not None and all(
        (isinstance(use.node, ast.Name) and isinstance(use.node.ctx, ast.Store))
        or isinstance(parent, ast.Return)
        or (isinstance(parent, ast.Attribute) and parent.attr in _METHODS_OF_PARSERS)
        for use in expression.budget.counted(owner.uses.get(name.id, ()))
        for parent in [use.parent.node if use.parent is not None else None]
    )


def returned(call: ScopedExpression) -> ScopedExpression | None:
    """Return what a call of a function of the script returns, if that ends with the only ``return``."""
    node = call.node
    bound = call.find(node.func) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
    definition = bound.binding.definition if bound is not None else None
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    inside = call.budget.counted(ast.walk(definition))
    ends = [inner for inner in inside if isinstance(inner, (ast.Return, ast.Yield, ast.YieldFrom))]
    last = definition.body[-1]
    if ends != [last] or not isinstance(last, ast.Return) or last.value is None:
        return None
    return ScopedExpression(last.value, call.scope.module.inner[definition], last.lineno)


def _listed(maker: ScopedExpression) -> ScopedExpression | None:
    """Return the classes that a parser is made with, by ``TrlParser((A, B))`` or ``x.add_parser(dataclass_types=...)``.

    A parser of subcommands hands the latter to a parser of its own kind.
    """
    node = maker.node
    if not isinstance(node, ast.Call):
        return None
    is_parser = dotted_name(maker.with_node(node.func)) in _PARSERS
    if not is_parser and not (isinstance(node.func, ast.Attribute) and node.func.attr == "add_parser"):
        return None
    positional = node.args if is_parser else []
    given = [*positional, *(keyword.value for keyword in node.keywords if keyword.arg == "dataclass_types")]
    return follow(maker.with_node(given[0])) if given else None


def trainer_names(expression: ScopedExpression) -> list[str]:
    """Return the dotted names of TRL's trainers among a class and its base classes."""
    return [name for name, _ in classes(expression) if is_trainer(name)]


def makes_trainer(function: ScopedExpression) -> bool:
    """Is the function a trainer's class of TRL, or one that the script derives from it without a constructor?"""
    bases = list(classes(function))
    own = [definition for _, definition in bases if definition is not None]
    return any(is_trainer(name) for name, _ in bases) and not any(map(constructor, own))


def is_trainer(dotted: str) -> bool:
    """Is it the dotted name of one of TRL's trainers?"""
    package, _, name = dotted.rpartition(".")
    return package.split(".")[0] == "trl" and name.endswith("Trainer") and name != "Trainer"


def constructor(definition: ast.ClassDef) -> ast.FunctionDef | None:
    """Return the constructor that a class of the script has, if it has one."""
    methods = [node for node in definition.body if isinstance(node, ast.FunctionDef)]
    return next((method for method in methods if method.name in ("__init__", "__new__", "__post_init__")), None)
