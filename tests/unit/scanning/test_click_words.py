"""What the scan says of a parameter of a click command is what the real command gets, or nothing."""

from __future__ import annotations

import ast
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.scanning.bindings import ScriptBindings
from trl_hotfix.scanning.scopes import ScopedExpression
from trl_hotfix.scanning.values import value_of

OPTIONS = {
    "beta": "'--beta', default=0.1, type=float",
    "size": "'-s', '--size', type=int",
    "on": "'--on', is_flag=True",
    "both": "'--both/--no-both', default=True",
    "name": "'--name', type=click.Choice(['dpo', 'sft']), default='dpo'",
    "many": "'--many', multiple=True, type=int",
    "pair": "'--pair', nargs=2, type=float",
    "level": "'-v', 'level', count=True",
    "text": "'--text', default='x', help='a text'",
}
WORDS: tuple[str, ...] = (
    "--beta 2",
    "-s 3",
    "--on",
    "--no-both",
    "--both",
    "--name sft",
    "--name kto",
    "--many 1",
    "--many 2",
)
WORDS += ("--pair 1 2", "-vv", "--text=", "--beta x", "--gone")


def parameter(text: str, name: str, words: list[str] | None) -> Any:
    script = ScriptBindings(ast.parse(text), words)
    (function,) = [node for node in script.scopes if isinstance(node, ast.FunctionDef)]
    return value_of(ScopedExpression(ast.Name(name, ast.Load(), lineno=99), script.scopes[function], 99))


@given(
    st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=5, unique=True),
    st.lists(st.sampled_from(WORDS), max_size=4),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_scan_says_what_the_real_command_gets(names: list[str], chosen: list[str]) -> None:
    decorators = "".join(f"@click.option({OPTIONS[name]})\n" for name in names)
    text = f"import click\n@click.command()\n{decorators}def main({', '.join(names)}):\n    pass\n"
    words = " ".join(chosen).split()
    made: dict[str, Any] = {}
    exec(text, made)
    try:
        real = made["main"].make_context("x", list(words)).params
    except click.ClickException:
        assert all(parameter(text, name, words).kind is Kind.UNKNOWN for name in names)
        return
    for name in names:
        told = parameter(text, name, words)
        expected = list(real[name]) if isinstance(real[name], tuple) else real[name]
        assert (told.kind, told.value) == (Kind.LITERAL, expected), name


PLAIN = "import click\n@click.command()\n@click.option('--beta', default=0.1)\ndef main(beta):\n    pass\n"


def test_a_command_line_that_nobody_told_is_unknown() -> None:
    assert parameter(f"{PLAIN}main()\n", "beta", ["--beta", "2"]).value == 2.0
    assert parameter(PLAIN, "beta", None).reason == "beta is of the command line, with the default 0.1"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("default=0.1", "default=0.1, envvar='BETA'"),
        ("default=0.1", "default=0.1, callback=f"),
        ("default=0.1", "default=0.1, prompt=True"),
        ("default=0.1", "default=f()"),
        ("default=0.1", "type=Mine()"),
        ("@click.option", "@other\n@click.option"),
        ("click.command()", "click.command(context_settings={'auto_envvar_prefix': 'X'})"),
        ("    pass\n", "    pass\nmain(['--beta', '3'])\n"),
        ("    pass\n", "    pass\nmain.main(args=x)\n"),
        ("    pass\n", "    beta = f()\n"),
    ],
)
def test_what_may_change_a_parameter_leaves_it_unknown(old: str, new: str) -> None:
    assert old in PLAIN
    assert parameter(PLAIN.replace(old, new), "beta", ["--beta", "2"]).kind is Kind.UNKNOWN
