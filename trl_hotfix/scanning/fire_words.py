"""What ``fire.Fire(main)`` gives a function of the script: its parameters by the words of the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .argparse_words import PLACE, Parsed
from .argv import change_of_argv
from .budget import literal
from .names import dotted_name
from .origins import Evaluate
from .parser_texts import UnclearError
from .scopes import Place, Scope, ScopedExpression, source_text

_FLAG = re.compile(r"--(?P<name>[A-Za-z][\w-]*)(=(?P<value>.*))?", re.DOTALL | re.ASCII)
_TEXT = re.compile(r"[A-Za-z_][\w./]*", re.ASCII)


def command_of_fire(definition: ast.AST, module: Scope, evaluate: Evaluate) -> Parsed | None:
    """Return the arguments of a function; None if Fire does not start it. Raises ``UnclearError``."""
    if not isinstance(definition, ast.FunctionDef):
        return None
    uses = [use for use in module.budget.counted(module.uses.get(definition.name, ())) if _is_fire(use)]
    if not uses:
        return None
    signature = definition.args
    if len(module.uses[definition.name]) > 1 or len(module.bindings[definition.name]) > 1 or definition.decorator_list:
        raise UnclearError(f"{definition.name} is more than the function that fire starts")
    if signature.vararg or signature.kwarg or signature.posonlyargs:
        raise UnclearError(f"{definition.name} has *args")
    line = change_of_argv(module)
    if line is not None:
        raise UnclearError(f"sys.argv may be changed at line {line}")
    defaults = _defaults(signature, module, evaluate)
    names = [parameter.arg for parameter in (*signature.args, *signature.kwonlyargs)]
    if module.words is None:
        return Parsed({}, untold={name: defaults.get(name, Argument(Kind.UNKNOWN)) for name in names})
    given = _given(module.words, names)
    missing = [name for name in names if name not in {**defaults, **given}]
    return Parsed({**defaults, **given}, refused=f"it needs {missing[0]}" if missing else "")


def _is_fire(use: Place) -> bool:
    """Is it ``main`` of ``fire.Fire(main)``?"""
    call = use.parent.node if use.parent is not None else None
    if not isinstance(call, ast.Call) or call.func is use.node:
        return False
    if dotted_name(ScopedExpression(call.func, use.scope, use.line)) != "fire.Fire":
        return False
    if call.args != [use.node] or call.keywords:
        raise UnclearError(f"{source_text(call)} is not read (line {use.line})")
    return True


def _defaults(signature: ast.arguments, module: Scope, evaluate: Evaluate) -> dict[str, Argument]:
    with_default = signature.args[len(signature.args) - len(signature.defaults) :]
    pairs = [*zip(with_default, signature.defaults, strict=True)]
    pairs += [(name, value) for name, value in zip(signature.kwonlyargs, signature.kw_defaults, strict=True) if value]
    return {name.arg: evaluate(ScopedExpression(value, module, value.lineno)) for name, value in pairs}


def _given(words: Sequence[str], names: Sequence[str]) -> Mapping[str, Argument]:
    """Read ``--beta 0.1 --size=3 --packing --noshuffle``. Other words are positional, or flags of Fire itself."""
    found: dict[str, Argument] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        flag = _FLAG.fullmatch(word)
        if flag is None:
            raise UnclearError(f"fire may read {word!r} in several ways")
        name = flag["name"].replace("-", "_")
        value: Any = True
        if flag["value"] is not None:
            value = _value(flag["value"])
        elif left and not left[0].startswith("-"):
            value = _value(left.pop(0))
        elif name not in names and name.startswith("no"):
            name, value = name.removeprefix("no"), False
        if name not in names:
            raise UnclearError(f"no parameter has the name of {word!r}")
        found[name] = replace(literal(value, None), place=PLACE)
    return found


def _value(word: str) -> Any:
    """Return the value that Fire reads: a literal of Python, or a text."""
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = word if _TEXT.fullmatch(word) else ...
    if value is not None and not isinstance(value, (bool, float, int, str)):
        raise UnclearError(f"fire may read {word!r} in several ways")
    return value
