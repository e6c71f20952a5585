"""Patch modules with one mistake in their code: the usual ones by cosmic-ray, and those of training code by us.

Only what the wrappers use is changed, and not what the self-test alone uses. A mutant is named by the function, what
stood there and what stands there now, so that its name outlives an edit elsewhere.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator

COSMIC_RAY = (
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBinaryOperator_Mul_Div",
    "ReplaceBinaryOperator_Div_Mul",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceBinaryOperator_Mod_Mul",
    "ReplaceBinaryOperator_Pow_Mul",
    "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceBinaryOperator_BitOr_BitAnd",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_Lt_GtE",
    "ReplaceComparisonOperator_Gt_LtE",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "NumberReplacer",
    "ZeroIterationForLoop",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
)
"""One or two operators for each kind of place. That of exceptions is left out: the breaker answers for these."""


@dataclass(frozen=True)
class CodeMutant:
    """The source of a patch module with one mistake."""

    name: str
    line: int
    source: str


def code_mutants(source: str, functions: Collection[str]) -> list[CodeMutant]:
    """Return the mutants of ``source`` in these functions and classes, without those that are equal."""
    tree = ast.parse(source)
    spans = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in functions
    ]
    known = {_what_runs(source)}
    mutants = []
    for mutant in (*_by_cosmic_ray(source), *_ours(tree)):
        where = next((name for first, last, name in spans if first <= mutant.line <= last), None)
        text = _what_runs(mutant.source)
        if where is None or text in known:
            continue
        known.add(text)
        mutants.append(CodeMutant(f"{where}: {mutant.name}", mutant.line, mutant.source))
    return mutants


class _WhatRuns(ast.NodeTransformer):
    """Takes out what changes no run: annotations, and ``strict`` of ``zip``, which is an assertion."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "zip":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        return self.generic_visit(node)


def _what_runs(source: str) -> str:
    return ast.dump(_WhatRuns().visit(ast.parse(source)))


def noting_gradients(source: str, functions: Collection[str]) -> str:
    """Return ``source`` with returned values that are noted if they have a gradient, by the names of their mutants."""
    tree = ast.parse(source)
    for function in tree.body:
        if getattr(function, "name", None) in functions:
            returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
            edits = {node: list(_edits_of_statement(node, {})) for node in returns}
            for node, named in edits.items():
                for name, _ in named:
                    value = node.value or ast.Constant(None)
                    node.value = _called("noted", ast.Constant(f"{function.name}: {name}"), value)
    return ast.unparse(ast.fix_missing_locations(tree))


def _by_cosmic_ray(source: str) -> Iterator[CodeMutant]:
    for name in COSMIC_RAY:
        operator = get_operator(f"core/{name}")()
        places = [start for node in ast_nodes(get_ast(source)) for start, _ in operator.mutation_positions(node)]
        for occurrence, (line, _) in enumerate(places):
            mutated = MutationVisitor.mutate_code(source, operator, occurrence)
            before, after = _different_lines(source, mutated)
            try:
                ast.parse(mutated)
            except SyntaxError:
                continue
            yield CodeMutant(f"`{before}` -> `{after}`", line, mutated)


def _different_lines(before: str, after: str) -> tuple[str, str]:
    """Return the first line that differs, as it was and as it is."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next(((old.strip(), new.strip()) for old, new in pairs if old != new), ("", ""))


RANK_COUNTS = ("num_processes", "world_size")

Edit = Callable[[Any], Any]
"""It gets a node, and returns what stands in its place: a node, several statements, or None."""


def _ours(tree: ast.Module) -> Iterator[CodeMutant]:
    """Give the mistakes of training code, each in a copy of the module."""
    parents = {id(child): parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        for text, edit in _edits(node, parents):
            yield CodeMutant(text, getattr(node, "lineno", 1), ast.unparse(_edited(tree, node, edit)))


def _edited(tree: ast.Module, node: ast.AST, edit: Edit) -> ast.Module:
    """Return a copy of ``tree`` in which ``edit(node)`` stands in the place of ``node``."""
    marker = "_to_be_edited"
    setattr(node, marker, True)
    edited = copy.deepcopy(tree)
    delattr(node, marker)

    class Editor(ast.NodeTransformer):
        def visit(self, child: ast.AST) -> ast.AST | list[ast.AST] | None:
            return edit(child) if hasattr(child, marker) else self.generic_visit(child)

    Editor().generic_visit(edited)
    result = ast.fix_missing_locations(edited)
    for block in ast.walk(result):
        if getattr(block, "body", None) == []:
            block.body = [ast.Pass()]
        if isinstance(block, ast.Try) and not block.handlers and not block.finalbody:
            block.finalbody = [ast.Pass()]
    return result


def _edits(node: ast.AST, parents: dict[int, ast.AST]) -> Iterator[tuple[str, Edit]]:
    if isinstance(node, ast.stmt):
        yield from _edits_of_statement(node, parents)
    elif isinstance(node, ast.BoolOp):
        for index, operand in enumerate(node.values):
            rest = [value for value in node.values if value is not operand]
            text = ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
            yield f"`{ast.unparse(node)}` -> `{text}`", lambda copied, index=index: _without(copied, index)
    elif isinstance(node, ast.IfExp):
        yield f"`{ast.unparse(node)}` -> `{ast.unparse(node.body)}`", lambda copied: copied.body
        yield f"`{ast.unparse(node)}` -> `{ast.unparse(node.orelse)}`", lambda copied: copied.orelse
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield f"without `if {ast.unparse(node.ifs[0])}`", lambda copied: _set(copied, ifs=[])
    elif isinstance(node, ast.Call):
        yield from _edits_of_call(node)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in RANK_COUNTS:
        yield f"`{ast.unparse(node)}` -> `1`", lambda copied: ast.Constant(1)


def _edits_of_statement(node: ast.stmt, parents: dict[int, ast.AST]) -> Iterator[tuple[str, Edit]]:
    text = ast.unparse(node).splitlines()[0]
    if text in ("act()", "call.act()"):
        return  # It changes no training. tests/bench/test_acts.py looks whether it is there.
    if isinstance(node, ast.If):
        # An early exit is such an `if`.
        yield f"without `{text}`", lambda copied: copied.orelse
        yield f"`{text}` -> always", lambda copied: copied.body
    elif (
        (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
        or isinstance(node, ast.AugAssign)
        or (isinstance(node, ast.Assign) and _is_set_before(node, parents))
    ):
        yield f"without `{text}`", lambda copied: None
    elif isinstance(node, ast.Try) and node.finalbody:
        yield f"without `finally: {ast.unparse(node.finalbody[0])}`", lambda copied: copied.body
    elif isinstance(node, ast.With):
        if all(item.optional_vars is None for item in node.items):
            yield f"without `{text}`", lambda copied: copied.body
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield f"`{text}` detached", lambda copied: _set(copied, value=_called("detached", copied.value))


def _edits_of_call(node: ast.Call) -> Iterator[tuple[str, Edit]]:
    text = ast.unparse(node)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes") and node.args:
        yield f"`{text}` on this rank alone", lambda copied: copied.args[0]
    elif name == "zip" and len(node.args) > 1:
        yield f"`{text}` sorted", lambda copied: _set(copied, args=[_sorted(copied.args[0]), *copied.args[1:]])
    elif name == "detach":
        yield f"`{text}` with its gradient", lambda copied: copied.func.value
    elif name in ("sum", "mean", "max", "min", "any", "all") and isinstance(node.func, ast.Attribute):
        other = {"sum": "mean", "mean": "sum", "max": "min", "min": "max", "any": "all", "all": "any"}[name]
        yield f"`{text}` -> `{other}`", lambda copied: _set(copied, func=_set(copied.func, attr=other))
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield (
                f"`{text}` without `{keyword.arg}`",
                lambda copied, index=index: _set(copied, keywords=_but(copied.keywords, index)),
            )


def _is_set_before(node: ast.Assign, parents: dict[int, ast.AST]) -> bool:
    """Return whether the name still has a value if this assignment is left out: another error would be too easy."""
    function = parents[id(node)]
    while not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        function = parents[id(function)]
    if isinstance(function, ast.Module):
        return False
    before = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    for other in ast.walk(function):
        if isinstance(other, ast.Name) and isinstance(other.ctx, ast.Store) and other.lineno < node.lineno:
            before.add(other.id)
    names = {
        child.id
        for target in node.targets
        for child in ast.walk(target)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    }
    return names <= before


def _called(function: str, *arguments: ast.expr) -> ast.Call:
    """Return a call of a function of ``detaching``. What a value is shows when it runs."""
    name = f"__import__('bench.mutants.detaching', fromlist=['']).{function}"
    return ast.Call(ast.parse(name, mode="eval").body, [*arguments], [])


def _sorted(value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("sorted", ast.Load()), [value], [ast.keyword("key", ast.Name("str", ast.Load()))])


def _without(node: ast.AST, index: int) -> ast.AST:
    assert isinstance(node, ast.BoolOp)
    rest = _but(node.values, index)
    return rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def _but(values: list[ast.expr], index: int) -> list[ast.expr]:
    return [*values[:index], *values[index + 1 :]]


def _set(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node
