"""Which body is this? A digest of a function's canonical syntax tree.

The digest is the same on every Python from 3.10 on, and does not see comments, layout or docstrings. The standard
library only: digests are compared between interpreters that have nothing installed.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import hashlib
import inspect
import io
import json
import linecache
import tokenize
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

ALGORITHM = "c1"


_Definition = ast.FunctionDef | ast.AsyncFunctionDef

_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# What differs between the parsers of two Python versions, or says nothing about behaviour.
_DROPPED = frozenset({"type_params", "type_comment", "type_ignores", "kind", "ctx"})


def parse(text: str) -> ast.Module:
    """``ast.parse``, asked again where another thread has disturbed it.

    CPython 3.11.7 was seen to raise ``SystemError`` where two threads parse at once, as it counts the depth of their
    trees together (see CPython issue 106905).
    """
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return ast.parse(text)
    return ast.parse(text)


def digest(definition: _Definition) -> str:
    """The fingerprint of a function definition: ``c1:`` and 16 hexadecimal digits."""
    text = json.dumps(canonical(definition), separators=(",", ":"))
    return f"{ALGORITHM}:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def canonical(value: Any) -> Any:
    if isinstance(value, list):
        return [canonical(each) for each in value]
    if not isinstance(value, ast.AST):
        return value
    if isinstance(value, ast.Constant):
        # JSON has no bytes, complex numbers or ellipsis, and what is None is left out below.
        return ["Constant", {"value": f"{type(value.value).__name__} {value.value!r}"}]
    kept = {}
    for name in value._fields:
        each = getattr(value, name, None) if name not in _DROPPED else None
        # Only whether there is one is asked: its indentation is not cleaned for that.
        if name == "body" and isinstance(value, _DOCUMENTED) and ast.get_docstring(value, clean=False) is not None:
            each = value.body[1:]
        if each is not None and each != []:
            kept[name] = canonical(each)
    return [type(value).__name__, kept]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The body of a function in this process. ``from_file`` is False if its code is not what its file says."""

    digest: str | None
    from_file: bool


def loaded(function: Any) -> Loaded:
    """The body of the function beneath every decorator of ``function``; without a source, its digest is None."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return Loaded(None, from_file=False)
    code = function.__code__
    # What `inspect.getsource` does, but for its search of the module that the function is in among all that there are.
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    return _loaded(code, code.co_filename, function.__qualname__, text)


@functools.lru_cache(maxsize=32)  # several patches have the same target
def _loaded(code: CodeType, path: str, name: str, text: str) -> Loaded:
    """``path`` is in the key, as code that is the same in two files is equal."""
    lines = io.StringIO(text).readlines()[code.co_firstlineno - 1 :]
    try:
        parsed = _parsed(_block(lines, code), name)
    except (IndexError, SyntaxError, ValueError):
        try:
            parsed = _parsed(inspect.getblock(lines), name)
        except (IndexError, SyntaxError, ValueError, tokenize.TokenError):  # the file is another one since
            return Loaded(None, from_file=True)
    definition = next((each for each in ast.walk(parsed) if isinstance(each, _Definition)), None)
    if definition is None:
        return Loaded(None, from_file=False)
    return Loaded(digest(definition), from_file=_same_code(code, parsed))


def _block(lines: list[str], code: CodeType) -> list[str]:
    """The lines of the definition that ``lines`` begin with: up to the first past its code that is no deeper than it.

    What ``inspect.getblock`` finds with a tokenizer, which takes as long as all the rest here. A line in the midst of a
    string, or between parentheses, may be taken for the end; but what is cut off there does not parse.
    """
    depth = len(lines[0]) - len(lines[0].lstrip())
    past = _last_line(code) - code.co_firstlineno + 1
    for number, line in enumerate(lines[past:], past):
        text = line.lstrip()
        if text and text[0] != "#" and len(line) - len(text) <= depth:
            return lines[:number]
    return lines


def _last_line(code: CodeType) -> int:
    own = (line for _, _, line in code.co_lines() if line is not None)
    return max([*own, *(_last_line(each) for each in code.co_consts if isinstance(each, CodeType))])


def _parsed(lines: list[str], name: str) -> ast.Module:
    head = ""
    if lines[0][:1].isspace():
        # In a class of its own name: dedenting would change the strings, and names are mangled by their class.
        head = f"class {name.split('.')[-2]}:\n" if "." in name else "if True:\n"
    return parse(head + "".join(lines))


def _same_code(code: CodeType, parsed: ast.Module) -> bool:
    """Is what is loaded what the file says? Compile the file's text again and compare."""
    flags = sum(getattr(__future__, each).compiler_flag for each in __future__.all_feature_names)
    again = compile(parsed, code.co_filename, "exec", flags=code.co_flags & flags, dont_inherit=True)
    found = _find(again, code.co_name)
    return found is not None and _shape(found) == _shape(code)


def _find(code: CodeType, name: str) -> CodeType | None:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found = const if const.co_name == name else _find(const, name)
            if found is not None:
                return found
    return None


def _shape(code: CodeType) -> tuple[Any, ...]:
    # Not co_code: a call of an imported name compiles to other instructions when its import is in sight.
    consts = tuple(_shape(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts)
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return arguments, code.co_names, code.co_varnames, code.co_freevars, consts


def _constant(value: Any) -> Any:
    # The order of a set that was read from a .pyc may be another than that of the same set just compiled.
    if isinstance(value, frozenset):
        return "frozenset", sorted(map(repr, value))
    return tuple(map(_constant, value)) if isinstance(value, tuple) else repr(value)
