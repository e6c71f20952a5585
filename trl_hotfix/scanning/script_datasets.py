"""The facts of a training dataset that a script makes itself, as far as its text shows the columns and the roles.

``Dataset.from_dict``, ``from_list`` and ``map`` with a function of the script are followed. What ``load_dataset``
returns is a dataset whose columns the text does not have.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..catalogue.conditions import Argument, Kind
from ..catalogue.facts import OF_DATASETS
from ..matching.dataset_facts import TEXT, GivenDataset, Reader, dataset_fact
from .names import dotted_name, follow
from .scopes import FUNCTIONS, ScopedExpression, source_text
from .uses import ANY_PART, changes_of
from .values import value_of

_MOST_STEPS = 40
_SAME_COLUMNS = frozenset(
    ["filter", "flatten_indices", "repeat", "select", "shard", "shuffle", "skip", "sort", "take", "train_test_split"]
)
"""Methods of a dataset that return rows of it."""

_PURE = _SAME_COLUMNS | {"add_column", "map", "push_to_hub", "remove_columns", "rename_column", "to_pandas"}


class Column(NamedTuple):
    """What is in a column: ``TEXT``, or the keys of messages. ``last_roles`` has those of the last messages of rows.

    What the text does not show is None.
    """

    kind: str | tuple[str, ...] | None = None
    last_roles: frozenset[str] | None = None


class Columns(NamedTuple):
    """The columns of a dataset that the text shows. ``complete``: it has no others."""

    known: Mapping[str, Column]
    complete: bool


_OPAQUE = Columns({}, complete=False)
_UNKNOWN_COLUMN = Column()


def script_dataset_facts(dataset: ScopedExpression) -> dict[str, Argument]:
    """Return the facts of the dataset that a trainer gets."""
    columns = _columns(dataset, 0)
    if columns is None:
        return {}
    known = columns.known
    given = GivenDataset(
        tuple(known),
        {name: column.kind for name, column in known.items() if column.kind is not None},
        {},
        {name: column.last_roles for name, column in known.items() if column.last_roles is not None},
    )
    reader = Reader("text", lambda: None, "the dataset of the script")
    told = OF_DATASETS if columns.complete else ["prefilled"]
    facts = {name: dataset_fact(name, given, reader) for name in told}
    return {name: fact for name, fact in facts.items() if fact.kind is not Kind.UNKNOWN}


def _columns(expression: ScopedExpression, steps: int) -> Columns | None:
    """Return the columns of a dataset, or None for what may be something else."""
    expression.budget.spend()
    node = expression.node
    if steps > _MOST_STEPS:
        return None
    if isinstance(node, ast.Name):
        bound = expression.find(node)
        if bound is None or changes_of(expression, _PURE.__contains__).changes:
            return None
        value = bound.value() or bound.whole()
        columns = _columns(value, steps + 1) if value is not None else None
        return columns if bound.value() is not None or columns is None else _OPAQUE
    if isinstance(node, ast.Subscript):
        is_split = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        owner = _columns(expression.with_node(node.value), steps + 1)
        return owner if is_split or owner is None else _OPAQUE
    if not isinstance(node, ast.Call):
        return None
    function = dotted_name(expression.with_node(node.func)) or ""
    if function.startswith("datasets."):
        return _made(function.rpartition(".")[2], node, expression)
    if not isinstance(node.func, ast.Attribute):
        return None
    owner = _columns(expression.with_node(node.func.value), steps + 1)
    return _changed(owner, node.func.attr, node, expression) if owner is not None else None


def _made(function: str, call: ast.Call, expression: ScopedExpression) -> Columns:
    """Return the columns of ``Dataset.from_dict({...})`` or ``Dataset.from_list([...])``."""
    given = expression.with_node(call.args[0]) if len(call.args) == 1 else None
    if given is None or function not in ("from_dict", "from_list"):
        return _OPAQUE
    if function == "from_dict":
        row = _items(given)
        return Columns({name: _merged(_rows(value)) for name, value in row.items()}, True) if row else _OPAQUE
    return _of_rows(list(_rows_of(given) or ()), Columns({}, complete=True))


def _changed(owner: Columns, method: str, call: ast.Call, expression: ScopedExpression) -> Columns:
    """Return the columns of what a method of a dataset returns."""
    named = {keyword.arg: expression.with_node(keyword.value) for keyword in call.keywords}
    positional = [expression.with_node(value) for value in call.args]
    if None in named or any(isinstance(value, ast.Starred) for value in call.args):
        return _OPAQUE
    if method in _SAME_COLUMNS:
        return owner
    if method == "remove_columns" and (positional or "column_names" in named):
        return _without(owner, (positional or [named["column_names"]])[0], call, expression)
    if method == "map" and (positional or "function" in named):
        batched = named.get("batched")
        if len(positional) > 1 or (batched is not None and value_of(batched).value is not False):
            return _OPAQUE
        removed = named.get("remove_columns")
        base = _without(owner, removed, call, expression) if removed is not None else owner
        rows = _returned((positional or [named["function"]])[0])
        return _of_rows(rows, base)
    return _OPAQUE


def _without(owner: Columns, removed: ScopedExpression, call: ast.Call, expression: ScopedExpression) -> Columns:
    """Return the columns without some, or none if these are ``dataset.column_names`` of the same dataset."""
    node = removed.node
    if isinstance(node, ast.Attribute) and node.attr in ("column_names", "features"):
        assert isinstance(call.func, ast.Attribute)
        is_same = source_text(node.value) == source_text(call.func.value) and removed.scope is expression.scope
        return Columns({}, complete=is_same)
    value = value_of(removed).value
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return _OPAQUE
    return Columns({name: column for name, column in owner.known.items() if name not in names}, owner.complete)


def _returned(function: ScopedExpression) -> list[ScopedExpression]:
    """Return the expressions that a function of the script may return; none if the text lacks one."""
    origin = follow(function)
    node, inner = origin.node, origin.scope.module.inner
    if isinstance(node, ast.Lambda):
        return [ScopedExpression(node.body, inner[node], node.body.lineno)]
    bound = origin.find(node) if isinstance(node, ast.Name) else None
    definition = bound.binding.definition if bound is not None and bound.binding.unconditional else None
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return []
    nodes = list(function.budget.counted(ast.walk(definition)))
    others = [one for one in nodes if isinstance(one, (*FUNCTIONS, ast.Lambda)) and one is not definition]
    ends = [one for one in nodes if isinstance(one, (ast.Return, ast.Yield, ast.YieldFrom))]
    if others or not isinstance(definition.body[-1], ast.Return):
        return []
    values = [end.value for end in ends if isinstance(end, ast.Return) and end.value is not None]
    scope = inner[definition]
    return [ScopedExpression(value, scope, value.lineno) for value in values] if len(values) == len(ends) else []


def _of_rows(rows: list[ScopedExpression], base: Columns) -> Columns:
    """Return the columns of a dataset whose rows have the keys of some dicts, on top of the columns of another."""
    items = [_items(row) or _stored(row) for row in rows]
    found = [one for one in items if one is not None]
    if not found or len(found) < len(items):
        return _OPAQUE
    names = dict.fromkeys(name for one in found for name in one)
    added = {
        name: _merged([_column(one[name]) for one in found]) if all(name in one for one in found) else _UNKNOWN_COLUMN
        for name in names
    }
    return Columns({**base.known, **added}, base.complete)


def _items(expression: ScopedExpression) -> dict[str, ScopedExpression] | None:
    """Return the values of a dict literal whose keys are texts."""
    origin = _unchanged(expression)
    node = origin.node if origin is not None else None
    if origin is None or not isinstance(node, ast.Dict):
        return None
    found: dict[str, ScopedExpression] = {}
    for key, value in origin.budget.counted(zip(node.keys, node.values, strict=True)):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            return None
        found[key.value] = origin.with_node(value)
    return found


def _stored(expression: ScopedExpression) -> dict[str, ScopedExpression] | None:
    """Return what a function stores in the row that it is called with and returns: ``row["text"] = value``."""
    node = expression.node
    bound = expression.find(node) if isinstance(node, ast.Name) else None
    if bound is None or bound.binding.parameter_of is None or bound.value() is not None:
        return None
    changes = changes_of(expression)
    parts = {*changes.by_part(), *changes.handed_out}
    if changes.of_any() is not None or ANY_PART in parts:
        return None
    # What is stored is not known, as a later change, or a branch, may store something else.
    unknown = expression.with_node(ast.copy_location(ast.Constant(None), node))
    return dict.fromkeys(sorted(parts), unknown) or None


def _unchanged(expression: ScopedExpression) -> ScopedExpression | None:
    """Follow a name to a literal that nothing changes."""
    if isinstance(expression.node, ast.Name) and changes_of(expression).changes:
        return None
    return follow(expression)


def _rows_of(expression: ScopedExpression) -> Iterable[ScopedExpression] | None:
    """Return the elements of ``[a, b]``, ``[a] * 10``, ``[a for ...]`` or a sum of these; None for anything else."""
    origin = _unchanged(expression)
    node = origin.node if origin is not None else None
    if origin is None or node is None:
        return None
    origin.budget.spend()
    if isinstance(node, ast.List):
        return [origin.with_node(element) for element in node.elts]
    if isinstance(node, ast.ListComp):
        return [ScopedExpression(node.elt, origin.scope.module.inner[node], node.elt.lineno)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _rows_of(origin.with_node(node.left)) or _rows_of(origin.with_node(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _rows_of(origin.with_node(node.left)), _rows_of(origin.with_node(node.right))
        return [*left, *right] if left is not None and right is not None else None
    return None


def _rows(expression: ScopedExpression) -> Iterator[Column]:
    yield from (_column(row) for row in _rows_of(expression) or ())


def _column(expression: ScopedExpression) -> Column:
    """Return what a value of a row is: a text, or a list of messages with their roles."""
    origin = _unchanged(expression)
    node = origin.node if origin is not None else None
    if origin is None or isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str):
        return Column(TEXT) if isinstance(node, (ast.JoinedStr, ast.Constant)) else _UNKNOWN_COLUMN
    if not isinstance(node, ast.List) or not node.elts:
        return _UNKNOWN_COLUMN
    messages = [_items(origin.with_node(element)) for element in node.elts]
    last = messages[-1]
    role = value_of(last["role"]).value if last is not None and "role" in last else None
    roles = frozenset([role]) if isinstance(role, str) else None
    keys = dict.fromkeys(key for message in messages for key in message or ())
    return Column(tuple(keys) if None not in messages else None, roles)


def _merged(columns: Iterable[Column]) -> Column:
    """Return what is in a column whose rows are of several kinds."""
    found = list(columns)
    if not found:
        return _UNKNOWN_COLUMN
    kinds = {column.kind for column in found}
    roles = [column.last_roles for column in found]
    kind = found[0].kind if len(kinds) == 1 else None
    return Column(kind, frozenset().union(*(one for one in roles if one)) if None not in roles else None)
