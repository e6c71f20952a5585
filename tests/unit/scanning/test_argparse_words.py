"""What the scan says of an argument of ``argparse`` is what the real parser of the same text gives, or nothing."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.scanning.bindings import ScriptBindings
from trl_hotfix.scanning.budget import too_large
from trl_hotfix.scanning.scopes import ScopedExpression
from trl_hotfix.scanning.told_parts import namespace_of
from trl_hotfix.scanning.values import value_of

_LAST = 10**6


def evaluated(text: str, expression: str, words: Sequence[str] | None = ()) -> Argument:
    """Evaluate an expression at the end of a script that is started with these words."""
    script = ScriptBindings(ast.parse(text), words)
    node = ast.parse(expression, mode="eval").body
    return script.budget.ask(lambda: value_of(ScopedExpression(node, script.module, _LAST)), too_large(None))


def is_refused(text: str, words: Sequence[str]) -> bool:
    script = ScriptBindings(ast.parse(text), words)
    (place,) = [place for place in script.calls if ast.unparse(place.node).endswith(".parse_args()")]
    assert isinstance(place.node, ast.Call)
    namespace = namespace_of(ScopedExpression(place.node, place.scope, _LAST), value_of)
    assert namespace is not None
    return bool(namespace.parsed.refused)


OPTIONS = (
    "'--beta', type=float, default=0.1",
    "'-b', '--big-step', type=int",
    "'--name', default='dpo', choices=['dpo', 'sft']",
    "'--level', type=int, choices=range(3), default='2'",
    "'--on', action='store_true'",
    "'--off', action='store_false', dest='packing'",
    "'--fast', action='store_const', const=7",
    "'--bool', type=bool, default=True",
    "'--both', action=argparse.BooleanOptionalAction, default=False",
    "'--many', nargs='+', type=float, default=[1.0]",
    "'--some', nargs='*'",
    "'--maybe', nargs='?', const=3, type=int",
    "'--pair', nargs=2",
    "'--add', action='append', default=['a']",
    "'-v', '--verbose', action='count', default=0",
    "'--must', required=True",
    "'--own', type=lambda word: word == 'x', default=None",
    "'--hidden', default=argparse.SUPPRESS",
    "'--rate', type=float, default='1e-5'",
    "'--rate-two', type=float, default=RATE",
    "'model'",
    "'files', nargs='*'",
    "'last', nargs='?', default='z'",
    "'number', type=int",
)
GOOD_WORDS: tuple[str, ...] = (
    "--beta 0.5",
    "-b3",
    "--big-step 4",
    "--big 1",
    "--name sft",
    "--level 1",
    "--on",
    "--off",
    "--fast",
    "--bool False",
)
GOOD_WORDS += (
    "--both",
    "--no-both",
    "--many 1 2",
    "--some",
    "--some a b",
    "--maybe",
    "--maybe 4",
    "--pair a b",
    "--add b",
)
GOOD_WORDS += (
    "-vv",
    "--verbose",
    "--must=1",
    "--own x",
    "--hidden h",
    "--rate-two 1",
    "m 3",
    "a b c",
    "7",
    "-- -1",
    "--rate=2",
)
ODD_WORDS = ("--beta", "--name kto", "--level 9", "--r 3", "--unknown", "-1", "--pair a", "--beta=", "--on=1", "--must")


def fits(words: str, options: Sequence[str]) -> bool:
    flag = words.split()[0].partition("=")[0]
    if not flag.startswith("-"):
        return any("'-" not in option for option in options)
    return any(flag.replace("--no-", "--")[:3] in option for option in options)


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Options, and words of which most fit them."""
    options = draw(st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=6, unique=True))
    fitting = [words for words in GOOD_WORDS if fits(words, options)]
    chosen = draw(st.lists(st.sampled_from(fitting), max_size=4))
    chosen += [draw(st.sampled_from(ODD_WORDS))] if draw(st.integers(0, 4)) == 0 else []
    chosen += ["--must=x"] if any("--must" in option for option in options) else []
    chosen += ["m"] if "'model'" in options else []
    chosen += ["3"] if "'number', type=int" in options else []
    return options, " ".join(chosen).split()


@given(
    command_line=command_lines(),
    grouped=st.integers(0, 3),
    defaults=st.sampled_from(["", "parser.set_defaults(beta=5, other='o')\n"]),
)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_scan_says_what_the_real_parser_gives(
    command_line: tuple[list[str], list[str]], grouped: int, defaults: str
) -> None:
    options, words = command_line
    group = "parser.add_mutually_exclusive_group()" if grouped == 1 else "parser.add_argument_group('x')"
    owners = [
        "group" if grouped and number % 2 and "--" in option else "parser" for number, option in enumerate(options)
    ]
    added = "".join(f"{owner}.add_argument({option})\n" for owner, option in zip(owners, options, strict=True))
    head = f"import argparse\nRATE = 2e-5\nparser = argparse.ArgumentParser()\ngroup = {group}\n"
    text = f"{head}{added}{defaults}"
    real = real_arguments(text, words)
    text = f"{text}args = parser.parse_args()\n"
    if real is None:
        # Choices that are no literal are not known, and a script that is refused for them does not run.
        has_unknown_choices = any("choices=range" in option for option in options)
        assert has_unknown_choices or evaluated(text, "args.beta", words).kind is Kind.UNKNOWN
        return
    assert not is_refused(text, words)
    for name, value in real.items():
        told = evaluated(text, f"args.{name}", words)
        if told.kind is not Kind.UNKNOWN:
            assert (told.kind, told.value, type(told.value)) == (Kind.LITERAL, value, type(value)), name
        assert (told.kind is Kind.UNKNOWN) is (name == "own" and value is not None), (name, told)


def real_arguments(text: str, words: list[str]) -> dict[str, Any] | None:
    """Return the arguments of the real parser; None if it refuses, or cannot be made."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            exec(text, names)
            return dict(vars(names["parser"].parse_args(words)))
        except (SystemExit, argparse.ArgumentError, ValueError):
            return None


HEAD = """\
import argparse
import sys
parser = argparse.ArgumentParser()
parser.add_argument('--beta', type=float, default=0.1)
"""
PARSED = f"{HEAD}args = parser.parse_args()\n"


@pytest.mark.parametrize(
    "expression", ["args.beta", "vars(args)['beta']", "getattr(args, 'beta')", "getattr(args, 'beta', 1)"]
)
def test_an_argument_is_read_in_each_form(expression: str) -> None:
    told = evaluated(PARSED, expression, ["--beta", "3"])
    assert (told.value, told.place) == (3.0, "the command line")
    default = evaluated(PARSED, expression, [])
    assert (default.value, default.line, default.place) == (0.1, 4, "")


def test_a_command_line_that_nobody_told_is_unknown_and_its_default_is_named() -> None:
    untold = evaluated(PARSED, "args.beta", None)
    assert untold.kind is Kind.UNKNOWN
    assert untold.reason == "args.beta is of the command line, with the default 0.1"
    fixed = f"{HEAD}parser.set_defaults(mode='x')\nargs = parser.parse_args()\n"
    assert evaluated(fixed, "args.mode", None).value == "x"


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}args, rest = parser.parse_known_args()\n",
        f"{HEAD}args = parser.parse_args(sys.argv[1:])\n",
        f"{HEAD}args = parser.parse_args(None)\n",
        f"{PARSED}print(args, vars(args))\nprint(f'{{args.beta}}')\n",
        f"{PARSED}use(**vars(args))\nother = args\n",
        f"{HEAD}if __name__ == '__main__':\n    args = parser.parse_args()\n",
        f"{HEAD}parser.add_argument_group('x').add_argument('--y')\nargs = parser.parse_args()\n",
        "import argparse as a\ndef get():\n    p = a.ArgumentParser('x', description='y')\n"
        "    p.add_argument('--beta', type=float)\n    return p.parse_args()\nargs = get()\n",
        "from argparse import ArgumentParser\ndef make():\n    p = ArgumentParser()\n    return p\ndef more(x):\n"
        "    x.add_argument('--beta', type=float)\nparser = make()\nmore(parser)\nargs = parser.parse_args()\n",
    ],
)
def test_a_parser_is_followed(text: str) -> None:
    assert evaluated(text, "args.beta", ["--beta", "3"]).value == 3.0


@pytest.mark.parametrize(
    "text",
    [
        f"{PARSED}args.beta = f()\n",
        f"{PARSED}change(args)\n",
        f"{PARSED}vars(args)['beta'] = 1\n",
        f"{PARSED}vars(args).update(beta=1)\n",
        f"{PARSED}setattr(args, name, 1)\n",
        f"{HEAD}add(parser)\nargs = parser.parse_args()\n",
        f"{HEAD}if x:\n    parser.add_argument('--y')\nargs = parser.parse_args()\n",
        f"{HEAD}for x in y:\n    parser.add_argument(x)\nargs = parser.parse_args()\n",
        f"{HEAD}parser.add_argument(x)\nargs = parser.parse_args()\n",
        f"{HEAD}parser.add_argument('--y', **x)\nargs = parser.parse_args()\n",
        f"{HEAD}parser.add_argument('--y', action=Mine)\nargs = parser.parse_args()\n",
        f"{HEAD}parser.set_defaults(**x)\nargs = parser.parse_args()\n",
        f"{HEAD}sub = parser.add_subparsers()\nargs = parser.parse_args()\n",
        f"{HEAD}args = parser.parse_args(words)\n",
        f"{HEAD}args = parser.parse_args(namespace=x)\n",
        f"{HEAD}sys.argv.append('--beta')\nargs = parser.parse_args()\n",
        f"{HEAD}sys.argv = ['x']\nargs = parser.parse_args()\n",
        f"{HEAD}del sys.argv[1]\nargs = parser.parse_args()\n",
        f"{HEAD}args = parser.parse_args()\nparser.add_argument('--y')\n",
        f"{HEAD}other = parser\nargs = parser.parse_args()\n",
        f"{HEAD}parser.add_argument('--n', nargs=10**9)\nargs = parser.parse_args()\n",
        "".join(
            [HEAD, *(f"parser.add_argument('p{n}', nargs='*')\n" for n in range(9)), "args = parser.parse_args()\n"]
        ),
        "import argparse\nparser = argparse.ArgumentParser(parents=[x])\nargs = parser.parse_args()\n",
        "import argparse\nparser = argparse.ArgumentParser(fromfile_prefix_chars='@')\nargs = parser.parse_args()\n",
    ],
)
def test_what_may_change_an_argument_leaves_it_unknown(text: str) -> None:
    assert evaluated(text, "args.beta", ["--beta", "3"]).kind is Kind.UNKNOWN
    assert evaluated(text, "vars(args)['beta']", ["--beta", "3"]).kind is Kind.UNKNOWN


def test_words_that_the_script_has_itself_are_read() -> None:
    text = f"{HEAD}args = parser.parse_args(['--beta', '2'])\n"
    for words in (None, ["--beta", "3"]):
        assert evaluated(text, "args.beta", words).value == 2.0


def test_a_list_of_an_argument_may_be_changed_in_place() -> None:
    text = f"{HEAD}parser.add_argument('--x', nargs='+')\nargs = parser.parse_args()\n"
    assert evaluated(text, "args.x", ["--x", "a"]).value == ["a"]
    assert evaluated(f"{text}args.x.append('b')\n", "args.x", ["--x", "a"]).kind is Kind.UNKNOWN


def test_a_value_that_the_script_sets_later_counts() -> None:
    assert evaluated(f"{PARSED}args.beta = 7\n", "args.beta", ["--beta", "3"]).value == 7


def test_all_arguments_can_be_unpacked(scan: Any) -> None:
    text = (
        "import argparse\nfrom trl import DPOConfig, DPOTrainer\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--beta')\nparser.set_defaults(precompute_ref_log_probs=True)\n"
        "DPOTrainer('m', args=DPOConfig(**vars(parser.parse_args()))).train()\n"
    )
    assert "dpo-precomputed-ref-logps-dropped" in scan(text)[0].hit_ids
    changed = text.replace("DPOConfig(**vars(parser.parse_args()))", "DPOConfig(**vars(f(parser)))")
    assert "dpo-precomputed-ref-logps-dropped" not in scan(changed)[0].hit_ids


def test_a_parser_with_more_options_than_can_be_read_is_unknown() -> None:
    options = "".join(f"parser.add_argument('--x{n}')\n" for n in range(600))
    told = evaluated(f"{HEAD}{options}args = parser.parse_args()\n", "args.beta", [])
    assert told.kind is Kind.UNKNOWN
