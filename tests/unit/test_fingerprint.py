from __future__ import annotations

import ast
import os
from pathlib import Path
from types import FunctionType

import pytest

from trl_hotfix import fingerprint


def test_the_order_of_a_set_among_the_constants_is_no_difference() -> None:
    # 0 and 8 fall into the same slot of a small set, so that the order is that in which they came.
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert (repr(one), one) != (repr(other), other)
    code = (lambda: None).__code__
    shapes = [fingerprint._shape(code.replace(co_consts=(None, ("a", each)))) for each in (one, other, frozenset([0]))]
    assert shapes[0] == shapes[1] != shapes[2]


def test_a_parser_that_another_thread_has_disturbed_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = ast.parse, []

    def disturbed(text: str) -> ast.Module:
        calls.append(text)
        if len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=33, after=30)")
        return real(text)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert ast.unparse(fingerprint.parse("x = 1")) == "x = 1"
    assert calls == ["x = 1"] * 3
    calls.clear()
    monkeypatch.setattr(ast, "parse", lambda text: disturbed(calls.clear() or text))
    with pytest.raises(SystemError):
        fingerprint.parse("x = 1")


SOURCE = "def f():\n    return 1\n"


def of_file(file: Path) -> FunctionType:
    """The function of ``SOURCE``, as if it was imported from ``file``."""
    return FunctionType(compile(SOURCE, str(file), "exec").co_consts[0], {})


NO_PYTHON = ["def f():\n    return (1,\n", 'x = """\n', "", "class A:\n  def f(self):\n", ")\n", "\0"]


@pytest.mark.parametrize("text", NO_PYTHON)
def test_a_file_that_has_been_changed_into_no_python_since_has_no_body(text: str, tmp_path: Path) -> None:
    file = tmp_path / "changed.py"
    file.write_text(SOURCE)
    assert fingerprint.loaded(of_file(file)).digest is not None
    file.write_text(text)
    os.utime(file, (1, 1))
    assert fingerprint.loaded(of_file(file)).digest is None


def test_the_same_code_in_two_files_has_the_body_of_its_own_file(tmp_path: Path) -> None:
    one, other = (of_file(tmp_path / name) for name in ("one.py", "other.py"))
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "other.py").write_text(SOURCE.replace("1", "2"))
    assert one.__code__ == other.__code__
    assert [fingerprint.loaded(each).from_file for each in (one, other, one)] == [True, False, True]
