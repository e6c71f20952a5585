"""What the scan says of a parameter of a typer command is what typer documents that it gets, or nothing.

typer is not among the packages of the tests. Its releases 0.12.5 and 0.29.2 gave the values below when they ran the
same functions by hand; 0.12.5 has no ``Literal``.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.scanning.bindings import ScriptBindings
from trl_hotfix.scanning.scopes import ScopedExpression
from trl_hotfix.scanning.told_commands import command_of
from trl_hotfix.scanning.values import value_of

HEAD = """\
from enum import Enum
from pathlib import Path
from typing import Annotated, List, Literal, Optional
import typer

class Loss(str, Enum):
    sigmoid = "sigmoid"
    IPO = "ipo"

class Mode(Enum):
    fast = "quick"
    slow = "slow"

class Odd(str, Enum):
    _ignore_ = "x"
    a = "a"

"""


def told(expression: str, parameters: str, words: str | None, text: str = "", body: str = "    pass") -> Argument:
    script = ScriptBindings(
        ast.parse(text or f"{HEAD}def main({parameters}):\n{body}\ntyper.run(main)\n"),
        words.split() if words is not None else None,
    )
    function = next(node for node in script.scopes if isinstance(node, ast.FunctionDef) and node.name == "main")
    node = ast.parse(expression, mode="eval").body
    for part in ast.walk(node):
        if isinstance(part, ast.expr):
            part.lineno = 99
    return value_of(ScopedExpression(node, script.scopes[function], 99))


@pytest.mark.parametrize(
    ("parameters", "words", "expected"),
    [
        ("beta: float = 0.1", "", 0.1),
        ("beta: float = 0.1", "--beta 2", 2.0),
        ("beta: float = 1", "", 1.0),
        ("beta: float = 0.1", "--beta 1e-5", 1e-5),
        ("beta: float", "0.5", 0.5),
        ("beta", "x", "x"),
        ("beta: bool = False", "--beta", True),
        ("beta: bool = True", "--no-beta", False),
        ("beta: Optional[bool] = None", "", None),
        ("beta: Optional[bool] = None", "--no-beta", False),
        ("beta: Optional[float] = None", "", None),
        ("beta: 'float | None' = None", "--beta 1", ...),
        ("beta: float | None = None", "--beta 1", 1.0),
        ("beta: float = typer.Option(0.1, '--lr', '-b', help='x')", "-b 3", 3.0),
        ("beta: float = typer.Option(0.1)", "", 0.1),
        ("beta: float = typer.Option(default=0.1)", "--beta=4", 4.0),
        ("beta: float = typer.Option(...)", "--beta 2", 2.0),
        ("beta: float = typer.Option(..., min=0, max=3)", "--beta 2", 2.0),
        ("beta: bool = typer.Option(False, '--on/--off')", "--on", True),
        ("beta: bool = typer.Option(False, '--on')", "--on", True),
        ("beta: Annotated[float, typer.Option('--lr')] = 0.1", "--lr 2", 2.0),
        ("beta: Annotated[float, typer.Option('--lr')] = 0.1", "", 0.1),
        ("beta: Annotated[float, typer.Option()]", "--beta 1", 1.0),
        ("beta: Annotated[float, typer.Argument()] = 0.1", "", 0.1),
        ("beta: Annotated[float, typer.Argument(help='x')] = 0.1", "3", 3.0),
        ("beta: float = typer.Argument(0.1)", "2", 2.0),
        ("beta: List[int] = [1, 2]", "", [1, 2]),
        ("beta: list[int] = [1, 2]", "--beta 3 --beta 4", [3, 4]),
        ("beta: List[str] = typer.Option([])", "", []),
        ("beta: List[str]", "a b", ["a", "b"]),
        ("beta: Literal['a', 'b'] = 'a'", "--beta b", "b"),
        ("beta: Loss = Loss.IPO", "", "ipo"),
        ("beta: Loss = Loss.IPO", "--beta sigmoid", "sigmoid"),
        ("beta: Loss = typer.Option(Loss.IPO, case_sensitive=False)", "--beta SIGMOID", "sigmoid"),
        ("beta: Mode = Mode.fast", "", ...),
        ("train_beta: int, beta: int = 3", "7 --beta 8", 8),
        ("out: Path = Path('x'), beta: int = 3", "--out y", 3),
        ("out: Path = typer.Option(Path('x'), exists=True), beta: int = 3", "", 3),
        ("ctx: typer.Context, beta: int = 3", "--beta 4", 4),
        # What typer makes of these differs between its releases, or is not read.
        ("beta: int = 3", "--beta 2.0", ...),
        ("beta: int = 0.5", "", ...),
        ("beta: str = 3", "", ...),
        ("beta: Optional[List[str]] = None", "", ...),
        ("Beta: int = 3, beta: int = 2", "", ...),
        ("beta: float = typer.Option(0.1, envvar='BETA')", "", ...),
        ("beta: float = typer.Option(0.1, callback=f)", "", ...),
        ("beta: float = typer.Option(0.1, prompt=True)", "", ...),
        ("beta: float = typer.Option(0.1, parser=f)", "", ...),
        ("beta: float = typer.Option(f)", "", ...),
        ("beta: float = typer.Option(default_factory=f)", "", ...),
        ("beta: float = f()", "", ...),
        ("beta=f()", "", ...),
        ("beta=0.1", "--beta 1", ...),
        ("beta: Mine = 3", "", ...),
        ("beta: tuple[int, int] = (1, 2)", "", ...),
        ("beta: Annotated[float, typer.Option('--lr')] = typer.Option(0.1)", "", ...),
        ("beta: Loss = 'ipo'", "", ...),
        ("beta: Odd = Odd.a", "", ...),
        ("beta: int = 3, *others", "", ...),
        ("beta: int = 3, **others", "", ...),
    ],
)
def test_a_parameter_has_what_typer_gives_it(parameters: str, words: str, expected: Any) -> None:
    found = told("beta", parameters, words)
    if expected is ...:
        assert found.kind is Kind.UNKNOWN
    else:
        assert (found.kind, found.value, type(found.value)) == (Kind.LITERAL, expected, type(expected))


def test_the_value_of_an_enumeration() -> None:
    assert told("mode.value", "mode: Mode = Mode.fast", "").value == "quick"
    assert told("mode.value", "mode: Mode = Mode.fast", "--mode slow").value == "slow"
    assert told("mode.name", "mode: Mode = Mode.fast", "").kind is Kind.UNKNOWN
    assert told("mode.value", "mode: Optional[Mode] = None", "").kind is Kind.UNKNOWN


def test_a_value_of_the_command_line_has_its_place() -> None:
    assert told("beta", "beta: float = 0.1", "--beta 2").place == "the command line"
    assert told("beta", "beta: float = 0.1", "").place == ""


def test_a_command_line_that_nobody_told_is_unknown() -> None:
    found = told("beta", "beta: float = 0.1", None)
    assert (found.kind, found.reason) == (Kind.UNKNOWN, "beta is of the command line, with the default 0.1")
    assert told("mode.value", "mode: Mode = Mode.fast", None).reason.endswith("with the default 'quick'")


def test_what_is_done_with_a_list_later_leaves_it_unknown() -> None:
    assert told("beta", "beta: List[int] = [1]", "", body="    beta.append(2)").kind is Kind.UNKNOWN


APP = f"{HEAD}app = typer.Typer(help='x')\n@app.command()\ndef main(beta: float = 0.1):\n    pass\napp()\n"


def test_an_app_with_one_command() -> None:
    assert told("beta", "", "--beta 2", APP).value == 2.0
    assert told("beta", "", "--beta 2", APP.replace("command()", "command('train', help='x')")).value == 2.0
    imported = APP.replace("typer.Typer", "T").replace("import typer", "from typer import Typer as T")
    assert told("beta", "", "--beta 2", imported).value == 2.0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\napp()", "\n@app.command()\ndef other():\n    pass\napp()"),
        ("\napp()", "\n@app.callback()\ndef other():\n    pass\napp()"),
        ("\napp()", "\napp.add_typer(others)\napp()"),
        ("\napp()", "\napp(['--beta', '3'])"),
        ("\napp()", "\nmain(beta=3)\napp()"),
        ("\napp()", "\napp2 = app\napp2(['--beta', '3'])"),
        ("\napp()", "\nrun(app)"),
        ("@app.command()", "@app.command()\n@other"),
        ("@app.command()", "@app.callback(invoke_without_command=True)"),
        ("@app.command()", "@app.command(context_settings={'auto_envvar_prefix': 'X'})"),
        ("help='x'", "callback=f"),
        ("help='x'", "context_settings={'auto_envvar_prefix': 'X'}"),
        ("    pass\napp", "    beta = f()\napp"),
        ("import typer\n", "import typer, sys\nsys.argv.append('--beta=3')\n"),
    ],
)
def test_what_may_change_a_parameter_leaves_it_unknown(old: str, new: str) -> None:
    before, after = APP.rsplit(old, 1)
    assert told("beta", "", "--beta 2", f"{before}{new}{after}").kind is Kind.UNKNOWN


@pytest.mark.parametrize("words", ["--gone", "--beta x", "3", "--beta"])
def test_words_that_typer_refuses_are_refused(words: str) -> None:
    script = ScriptBindings(ast.parse(APP), words.split())
    (function,) = [node for node in script.scopes if isinstance(node, ast.FunctionDef)]
    found = command_of(function, script.module, value_of)
    assert found is not None
    assert found[0].refused
