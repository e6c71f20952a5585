"""The digest of a function's body, from its file or from its code."""

from __future__ import annotations

import argparse
import ast
import asyncio.base_events
import email.message
import inspect
import os
import pickletools
import typing
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from trl_hotfix.matching import digests


def test_the_order_of_a_constant_set_does_not_matter() -> None:
    # 0 and 8 have the same slot in a small set, so they keep their insertion order.
    first, second = frozenset([0, 8]), frozenset([8, 0])
    assert (repr(first), first) != (repr(second), second)
    code = (lambda: None).__code__
    shapes = [
        digests._shape(code.replace(co_consts=(None, ("a", constant)))) for constant in (first, second, frozenset([0]))
    ]
    assert shapes[0] == shapes[1] != shapes[2]


def test_a_disturbed_parser_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = ast.parse, []

    def disturbed(text: str) -> ast.Module:
        calls.append(text)
        if len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=33, after=30)")
        return real(text)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert ast.unparse(digests.parse("x = 1")) == "x = 1"
    assert calls == ["x = 1"] * 3
    calls.clear()
    monkeypatch.setattr(ast, "parse", lambda text: disturbed(calls.clear() or text))
    with pytest.raises(SystemError):
        digests.parse("x = 1")


SOURCE = "def f():\n    return 1\n"


def of_file(file: Path) -> FunctionType:
    """Return the function of ``SOURCE``, as if it was imported from ``file``."""
    return FunctionType(compile(SOURCE, str(file), "exec").co_consts[0], {})


NO_PYTHON = ["def f():\n    return (1,\n", 'x = """\n', "", "class A:\n  def f(self):\n", ")\n", "\0"]


@pytest.mark.parametrize("text", NO_PYTHON)
def test_a_file_changed_to_invalid_python_has_no_body(text: str, tmp_path: Path) -> None:
    file = tmp_path / "changed.py"
    file.write_text(SOURCE)
    assert digests.loaded(of_file(file)).digest is not None
    file.write_text(text)
    os.utime(file, (1, 1))
    assert digests.loaded(of_file(file)).digest is None


def test_equal_code_in_two_files_has_its_own_body(tmp_path: Path) -> None:
    first, second = (of_file(tmp_path / name) for name in ("one.py", "other.py"))
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "other.py").write_text(SOURCE.replace("1", "2"))
    assert first.__code__ == second.__code__
    assert [digests.loaded(function).from_file for function in (first, second, first)] == [True, False, True]


BODIES = {
    "a constant": "def f():\n    return 1\n",
    "another constant": "def f():\n    return 2\n",
    "a constant of another type": "def f():\n    return 1.0\n",
    "a name": "def f():\n    return x\n",
    "another name": "def f():\n    return y\n",
    "two statements": "def f():\n    x\n    return 1\n",
    "in the other order": "def f():\n    return 1\n    x\n",
    "an argument": "def f(x):\n    return 1\n",
    "a default": "def f(x=1):\n    return 1\n",
    "a keyword": "def f(*, x=1):\n    return 1\n",
    "an operator": "def f():\n    return 1 + 1\n",
    "another operator": "def f():\n    return 1 - 1\n",
    "a comparison": "def f():\n    return 1 < 1\n",
    "another comparison": "def f():\n    return 1 <= 1\n",
}


def digest_of(text: str, file: Path) -> str:
    file.write_text(text)
    os.utime(file, ns=(0, len(text)))
    names: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), names)
    body = digests.loaded(names["f"])
    assert body.digest is not None
    assert body.from_file
    return body.digest


def test_different_bodies_have_different_digests(tmp_path: Path) -> None:
    by_digest: dict[str, str] = {}
    for number, (name, text) in enumerate(BODIES.items()):
        digest = digest_of(text, tmp_path / f"body_{number}.py")
        assert digest not in by_digest, (name, by_digest[digest])
        by_digest[digest] = name


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return 1  # a comment\n",
        "def f():\n\n\n    return (1)\n",
        'def f():\n    "A docstring."\n    return 1\n',
    ],
    ids=["a comment", "the layout", "a docstring"],
)
def test_the_digest_is_that_of_the_code_alone(text: str, tmp_path: Path) -> None:
    plain = digest_of(BODIES["a constant"], tmp_path / "plain.py")
    assert digest_of(text, tmp_path / "other.py") == plain
    # It is the same on every Python, since it is on record.
    assert plain == "c1:22bed2a645fc19f8"


ENDS = {
    "the next definition": "def f():\n    return 1\ndef g():\n    return 2\n",
    "the end of the file": "def f():\n    return 1",
    "a line of its own": "def f(): return 1\nx = 2\n",
    "a statement": "def f():\n    return 1\n\n\nx = f\n",
    "a comment further out": "def f():\n    if f:\n        return 1\n# further out\n    return 2\nx = 3\n",
    "a comment further out, past all code": "def f():\n    return 1\n# further out\n    ...\nx = 3\n",
    "a header that ends further out": "def f(\n    a=1,\n):\n    return a\nx = 2\n",
    "code that is optimised away": "def f():\n    return 1\n    if 0:\n        f(2)\n    ...\nx = 3\n",
    "a string with lines further out": 'def f():\n    return 1\n    """\nx = 2\n    """\n    ...\ny = 3\n',
    "a call that ends further out": "def f():\n    return f(\n1,\n)\nx = 2\n",
    "a call that is optimised away and ends further out": "def f():\n    return 1\n    f(\n2\n)\nx = 3\n",
    "a line that goes on": "def f():\n    return 1 + \\\n2\nx = 3\n",
    "another method": "class A:\n    def f(self):\n        return 1\n    def g(self):\n        return 2\n",
    "the end of the class": "class A:\n    @staticmethod\n    def f():\n        return 1\n\nx = 2\n",
    "an inner function": "def f():\n    def inner():\n        return 1\n\n    return inner\n\n\nx = 2\n",
    "the end of a branch": "if 1:\n    def f():\n        return 1\nelse:\n    x = 2\n",
    "tabs": "class A:\n\tdef f(self):\n\t\treturn 1\n\tx = 2\n",
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_a_body_ends_where_its_definition_does(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), names)
    body = digests.loaded(vars(names["A"])["f"] if "A" in names else names["f"])
    (definition,) = (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == "f"
    )
    assert body == digests.Loaded(digests.digest(definition), from_file=True)


def attributes(value: object) -> list[object]:
    return list(vars(value).values()) if isinstance(value, type) else []


def functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in [
        *vars(module).values(),
        *(attribute for owner in vars(module).values() for attribute in attributes(owner)),
    ]:
        function = getattr(value, "__func__", value)
        own = isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__
        # A function defined in another one is no target: no name reaches it.
        if own and "<locals>" not in function.__qualname__:
            yield function


@pytest.mark.parametrize(
    "module", [argparse, asyncio.base_events, email.message, inspect, pickletools, typing, unittest.mock]
)
def test_bodies_of_real_modules_match_their_files(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    definitions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]): node for node in definitions}
    located = {node: lines.get(node.__code__.co_firstlineno) for node in functions(module)}
    known = {function: definition for function, definition in located.items() if definition is not None}
    assert len(known) > 20
    for function, definition in known.items():
        if not hasattr(function, "__wrapped__"):
            assert digests.loaded(function).digest == digests.digest(definition), function
