from __future__ import annotations

import ast

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
