"""Whether each reward function gives a reward for each completion, as far as its text tells.

TRL gives a reward function lists with an element for each completion: prompts, completions, columns of the dataset.
So ``[... for x in completions]`` has a reward for each, and so has a list that gets one in each turn of such a loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ..catalogue.conditions import Argument, Kind
from .indirect import target
from .names import dotted_name, follow
from .scopes import ScopedExpression, called_name
from .values import value_of

ONE_FOR_EACH = "each"

_NO_LISTS = {"trainer_state", "log_extra", "log_metric"}
"""What TRL gives a reward function besides the lists that have an element for each completion."""

_OF_TRL = ("trl.rewards.accuracy_reward", "trl.rewards.reasoning_accuracy_reward", "trl.rewards.think_format_reward")


def rewards_of(functions: ScopedExpression) -> Argument:
    """Return ``ONE_FOR_EACH`` if all functions of ``reward_funcs`` give that, and else that it is unknown."""
    listed = follow(functions)
    elements = listed.node.elts if isinstance(listed.node, (ast.List, ast.Tuple)) else [listed.node]
    if elements and all(_gives_each(listed.with_node(element)) for element in elements):
        return Argument(Kind.LITERAL, ONE_FOR_EACH, line=functions.line)
    return Argument(Kind.UNKNOWN, line=functions.line, reason="a reward function may give another number of rewards")


def _gives_each(function: ScopedExpression) -> bool:
    if dotted_name(function) in _OF_TRL:
        return True
    value = value_of(function)
    if value.kind is Kind.LITERAL:
        return isinstance(value.value, str)  # A reward model.
    aim = target(function)
    name = aim.function.node
    bound = aim.function.find(name) if isinstance(name, ast.Name) else None
    if bound is None or not bound.binding.unconditional or aim.partials:
        return False
    definition = bound.binding.definition
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) or definition.decorator_list:
        return False
    nodes = list(function.budget.counted(ast.walk(definition)))
    return _Body(definition, nodes).gives_each()


class _Body:
    """The body of a reward function."""

    def __init__(self, definition: ast.FunctionDef | ast.AsyncFunctionDef, nodes: Sequence[ast.AST]) -> None:
        self._body, self._nodes = definition.body, nodes
        given = definition.args
        named = {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        rebound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        self._lists = named - _NO_LISTS - rebound
        self._asked: list[str] = []
        self._iterated = {node.iter for node in nodes if isinstance(node, (ast.For, ast.comprehension))}

    def gives_each(self) -> bool:
        """Whether the function ends with its only ``return``, that of an element for each element of its lists."""
        ends = [node for node in self._nodes if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom))]
        last = self._body[-1]
        if ends != [last] or not isinstance(last, ast.Return):
            return False
        if isinstance(last.value, ast.Name):
            return self._collects(last.value.id, last.lineno)
        return self._is_of_each(last.value)

    def _is_of_each(self, value: ast.AST | None) -> bool:
        """Whether it is ``[... for x in completions]``, or of several of its lists by ``zip``."""
        if not isinstance(value, ast.ListComp) or len(value.generators) != 1:
            return False
        (over,) = value.generators
        return not over.ifs and self._is_list(over.iter)

    def _is_list(self, value: ast.AST) -> bool:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("zip", "enumerate"):
            return bool(value.args) and all(self._is_list(argument) for argument in value.args)
        return isinstance(value, ast.Name) and (value.id in self._lists or self._collects(value.id, value.lineno))

    def _looks(self, name: str) -> list[ast.AST]:
        """Return the uses of a name that leave a list as it is: what a loop goes over, and what is returned."""
        last = self._body[-1]
        found: list[ast.AST | None] = [last.value] if isinstance(last, ast.Return) else []
        for over in self._iterated:
            is_zip = isinstance(over, ast.Call) and called_name(over.func) in ("zip", "enumerate")
            found += over.args if isinstance(over, ast.Call) and is_zip else [over]
        return [node for node in found if isinstance(node, ast.Name) and node.id == name]

    def _collects(self, name: str, line: int) -> bool:
        """Whether ``name`` is such a list at a line, or began empty and got an element in each turn of such a loop."""
        if name in self._asked:
            return False
        self._asked.append(name)
        answer = self._is_collected(name, line)
        self._asked.pop()
        return answer

    def _is_collected(self, name: str, line: int) -> bool:
        looks = self._looks(name)
        uses = [node for node in self._nodes if isinstance(node, ast.Name) and node.id == name and node not in looks]
        first = next((value for one in self._body if (value := _assigned(one, name)) is not None), None)
        if self._is_of_each(first):
            return len(uses) == 1  # It is assigned, and looked at.
        loops = [one for one in self._body if isinstance(one, ast.For) and self._is_list(one.iter)]
        appended = [(loop, counts) for loop in loops if (counts := _appends(loop.body, name)) != {0}]
        if len(appended) != 1 or not isinstance(first, ast.List) or first.elts:
            return False
        (loop, counts), *_ = appended
        if counts != {1} or any(isinstance(node, (ast.Break, ast.Continue)) for node in ast.walk(loop)):
            return False
        if line <= (loop.end_lineno or line):
            return False
        # It is assigned, and used in the appends that were counted alone.
        return len(uses) == 1 + sum(1 for _ in _counted(loop.body, name))


def _assigned(statement: ast.stmt, name: str) -> ast.expr | None:
    """Return the value of ``name = value`` or of ``name: kind = value``."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None
    return statement.value if isinstance(target, ast.Name) and target.id == name else None


def _appends(body: Sequence[ast.stmt], name: str) -> set[int]:
    """Return how many elements ``name`` may get in these statements, through the branches of each ``if``."""
    counts = {0}
    for statement in body:
        more = {1} if _is_append(statement, name) else {0}
        if isinstance(statement, ast.If):
            more = _appends(statement.body, name) | _appends(statement.orelse, name)
        counts = {before + added for before in counts for added in more}
    return counts


def _counted(body: Sequence[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Yield the appends that ``_appends`` counts."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _counted([*statement.body, *statement.orelse], name)
        elif _is_append(statement, name):
            yield statement


def _is_append(statement: ast.stmt, name: str) -> bool:
    """Whether it is ``name.append(...)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    owner = function.value if isinstance(function, ast.Attribute) and function.attr == "append" else None
    return isinstance(owner, ast.Name) and owner.id == name
