"""Which value a name has at a line, in scopes that are made by hand; ``ScriptBindings`` makes them from a script."""

from __future__ import annotations

import ast

import pytest

from trl_hotfix.scanning.scopes import Binding, Scope, ScopedExpression, source_text


def assigned(line: int, source: str, unconditional: bool = True) -> Binding:
    return Binding(line, unconditional, ast.parse(source, mode="eval").body)


def value_at(scope: Scope, name: str, line: int) -> str | None:
    """Return the text of the value, None if it is not known, "unbound" if the file does not bind the name."""
    bound = scope.find(name, line)
    if bound is None:
        return "unbound"
    expression = bound.value()
    return None if expression is None else source_text(expression.node)


def test_the_last_assignment_before_the_line_counts() -> None:
    scope = Scope(None)
    scope.bind("beta", assigned(1, "0.1"))
    scope.bind("beta", assigned(5, "0.5"))
    assert [value_at(scope, "beta", line) for line in (2, 6)] == ["0.1", "0.5"]
    assert value_at(scope, "gamma", 6) == "unbound"


def test_a_conditional_assignment_leaves_the_value_unknown() -> None:
    scope = Scope(None)
    scope.bind("beta", assigned(1, "0.1"))
    scope.bind("beta", assigned(3, "0.5", unconditional=False))
    bound = scope.find("beta", 4)
    assert bound is not None
    assert bound.value() is None
    assert bound.binding.reason == "beta is assigned more than once (lines 1, 3)"
    # Line 2 comes before the condition.
    assert value_at(scope, "beta", 2) == "0.1"


def test_an_inner_scope_sees_names_that_are_assigned_once() -> None:
    module = Scope(None)
    module.bind("beta", assigned(9, "0.1"))
    function = Scope(Scope(module))
    assert value_at(function, "beta", 2) == "0.1"
    # The text does not tell whether the function is called before or after the second assignment.
    module.bind("beta", assigned(10, "0.5"))
    assert value_at(function, "beta", 11) is None
    function.bind("beta", assigned(3, "0.7"))
    assert value_at(function, "beta", 4) == "0.7"


def test_a_method_does_not_see_the_names_of_its_class() -> None:
    class_scope = Scope(Scope(None), of_class=True)
    class_scope.bind("beta", assigned(2, "0.1"))
    assert value_at(class_scope, "beta", 3) == "0.1"
    assert value_at(Scope(class_scope), "beta", 3) == "unbound"


def test_a_global_name_is_bound_in_the_module_and_depends_on_the_call() -> None:
    module = Scope(None)
    function = Scope(Scope(module), global_names={"beta"})
    function.bind("beta", assigned(3, "0.1"))
    assert function.bindings == {}
    assert [binding.unconditional for binding in module.bindings["beta"]] == [False]
    # What it is in the function has other names, and is not looked up in the module.
    assert value_at(module, "beta", 4) is None
    module.bind("beta", assigned(5, "0.5"))
    assert value_at(module, "beta", 6) is None


@pytest.mark.parametrize(
    ("imported", "expected"),
    [(("trl.A", "trl.experimental.A"), "trl.A"), (("other.A", "trl.A"), "trl.A"), (("one.A", "two.A"), "two.A")],
)
def test_the_import_from_trl_counts_among_several(imported: tuple[str, ...], expected: str) -> None:
    scope = Scope(None)
    for line, dotted in enumerate(imported, start=1):
        scope.bind("A", Binding(line, False, dotted=dotted))
    bound = scope.find("A", 5)
    assert bound is not None
    assert bound.binding.dotted == expected


def test_the_names_of_an_expression_are_looked_up_where_it_was_assigned() -> None:
    module = Scope(None)
    module.bind("beta", assigned(1, "0.1"))
    module.bind("args", assigned(2, "(beta,)"))
    module.bind("beta", assigned(3, "0.5"))
    bound = module.find("args", 4)
    assert bound is not None
    expression = bound.value()
    assert expression is not None
    assert isinstance(expression.node, ast.Tuple)
    (name,) = expression.node.elts
    assert isinstance(name, ast.Name)
    bound = expression.with_node(name).find(name)
    assert bound is not None
    assert bound.value() == ScopedExpression(module.bindings["beta"][0].value or name, module, 1)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if a:\n    f(1)", "if a: f(1)"),
        (f"f({'x' * 80!r})", f"f('{'x' * 54}..."),
        (f"f({'x' * 55!r})", f"f('{'x' * 55}')"),
    ],
)
def test_a_piece_of_the_script_is_one_short_line(source: str, expected: str) -> None:
    text = source_text(ast.parse(source))
    assert text == expected
    assert len(text) <= 60
    assert source_text(None) == ""


def test_a_very_long_expression_is_not_unparsed() -> None:
    node: ast.expr = ast.Constant(1)
    for _ in range(100_000):
        node = ast.UnaryOp(ast.USub(), node)
    assert source_text(node) == "a long expression"
