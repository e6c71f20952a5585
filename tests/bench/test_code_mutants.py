"""Each mutant of a patch module has one mistake, in what a wrapper uses."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest

from bench.mutants import detaching
from bench.mutants.code_mutants import code_mutants, noting_gradients


def names(body: str) -> set[str]:
    """Return the mutants of a function with this body, without the name of the function."""
    source = "def wrapper(wrapped, instance, args, kwargs):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
    mutants = code_mutants(source + "\n", {"wrapper"})
    for mutant in mutants:
        ast.parse(mutant.source)
    return {mutant.name.removeprefix("wrapper: ") for mutant in mutants}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("if args:\n    return wrapped()\nreturn 2", "without `if args:`"),
        ("if args:\n    return wrapped()\nreturn 2", "`if args:` -> always"),
        ("return a and b", "`a and b` -> `a`"),
        ("return a and b", "`a and b` -> `b`"),
        ("return a if b else c", "`a if b else c` -> `a`"),
        ("return a if b else c", "`a if b else c` -> `c`"),
        ("return [x for x in args if x]", "without `if x`"),
        ("args = args[1:]\nreturn args", "without `args = args[1:]`"),
        ("instance.x = 1", "without `instance.x = 1`"),
        ("instance.x += 1", "without `instance.x += 1`"),
        ("instance.hook()", "without `instance.hook()`"),
        ("try:\n    wrapped()\nfinally:\n    instance.remove()", "without `finally: instance.remove()`"),
        ("with shadowed(instance):\n    wrapped()", "without `with shadowed(instance):`"),
        ("return instance.gather(loss)", "`instance.gather(loss)` on this rank alone"),
        ("return instance.num_processes", "`instance.num_processes` -> `1`"),
        ("return zip(args, kwargs)", "`zip(args, kwargs)` sorted"),
        ("return loss.detach()", "`loss.detach()` with its gradient"),
        ("return loss.sum()", "`loss.sum()` -> `mean`"),
        ("return wrapped(*args, top_k=1)", "`wrapped(*args, top_k=1)` without `top_k`"),
        ("return loss", "`return loss` detached"),
        ("return a + b", "`return a + b` -> `return a - b`"),
        ("return a < b", "`return a < b` -> `return a <= b`"),
        ("return f(True)", "`return f(True)` -> `return f(False)`"),
        ("return 3", "`return 3` -> `return 4`"),
    ],
)
def test_a_mistake_has_a_name(body: str, name: str) -> None:
    assert name in names(body)


def test_a_value_without_a_gradient_cannot_lose_one() -> None:
    torch = pytest.importorskip("torch")
    source = "def wrapper(value):\n    if value is None:\n        return value\n    return value, 1\n"
    names = {mutant.name for mutant in code_mutants(source, {"wrapper"})}
    namespace: dict[str, Any] = {}
    exec(noting_gradients(source, {"wrapper"}), namespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detaching, "has_gradient", set())
        assert namespace["wrapper"](None) is None
        assert namespace["wrapper"](torch.ones(1)) == (torch.ones(1), 1)
        assert not detaching.has_gradient
        namespace["wrapper"](torch.ones(1, requires_grad=True))
        assert detaching.has_gradient == {"wrapper: `return (value, 1)` detached"} <= names


def test_what_changes_no_run_is_no_mutant() -> None:
    source = "def wrapper(a: int | None) -> int | None:\n    b: int | None = a\n    return zip(b, a, strict=True)\n"
    names = {mutant.name for mutant in code_mutants(source, {"wrapper"})}
    assert names == {
        "wrapper: `return zip(b, a, strict=True)` detached",
        "wrapper: `zip(b, a, strict=True)` sorted",
    }


def test_what_no_wrapper_uses_stays() -> None:
    source = "def wrapper():\n    return 1\n\n\ndef self_test():\n    return 2\n"
    assert {mutant.name.partition(":")[0] for mutant in code_mutants(source, {"wrapper"})} == {"wrapper"}


def test_a_name_that_would_be_unknown_is_not_removed() -> None:
    assert "without `loss = wrapped()`" not in names("loss = wrapped()\nreturn loss")


def test_no_two_mutants_are_equal_and_none_is_the_original() -> None:
    source = "def wrapper(a, b):\n    if a and b:\n        return a + b\n    return a\n"
    mutants = code_mutants(source, {"wrapper"})
    texts = [ast.dump(ast.parse(mutant.source)) for mutant in mutants]
    assert len(texts) == len(set(texts)) > 5
    assert ast.dump(ast.parse(source)) not in texts
