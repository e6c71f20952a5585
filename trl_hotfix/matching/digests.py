"""The digest of a function's canonical syntax tree, which identifies its body.

The digest is the same on every Python from 3.10 on, and does not depend on comments, layout or docstrings. Only the
standard library is imported, since digests are compared between interpreters that have nothing installed.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import linecache
import tokenize
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from types import CodeType, FunctionType
from typing import Any

ALGORITHM = "c1"


_Definition = ast.FunctionDef | ast.AsyncFunctionDef

_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# These fields differ between the parsers of two Python versions, or have no effect on behaviour.
_DROPPED = frozenset({"type_params", "type_comment", "type_ignores", "kind", "ctx"})


def parse(text: str) -> ast.Module:
    """Return ``ast.parse(text)``, and try again after a ``SystemError``.

    CPython 3.11.7 was seen to raise ``SystemError`` when two threads parse at once, since it counts the depths of their
    trees together (see CPython issue 106905).
    """
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return ast.parse(text)
    return ast.parse(text)


def digest(definition: _Definition) -> str:
    """Return the fingerprint of a function definition: ``c1:`` and 16 hexadecimal digits."""
    return f"{ALGORITHM}:{hashlib.sha256(canonical(definition).encode()).hexdigest()[:16]}"


def canonical(value: Any) -> str:
    """Return a syntax tree, or what a field of one holds, as JSON: a node is its class and its fields.

    The text is put together here, since making lists and dicts of the tree for ``json`` takes twice as long.
    """
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if not isinstance(value, ast.AST):
        return json.dumps(value)
    if isinstance(value, ast.Constant):
        # JSON has no bytes, complex numbers or ellipsis, and fields that are None are left out below.
        return f'["Constant",{{"value":{canonical(f"{type(value.value).__name__} {value.value!r}")}}}]'
    kept = []
    for name in _kept_fields(type(value)):  # type: ignore[arg-type]
        child = getattr(value, name, None)
        # Only the presence of a docstring matters, so its indentation is not cleaned.
        if name == "body" and isinstance(value, _DOCUMENTED) and ast.get_docstring(value, clean=False) is not None:
            child = value.body[1:]
        if child is not None and child != []:
            kept.append(f'"{name}":{canonical(child)}')
    return f'["{type(value).__name__}",{{{",".join(kept)}}}]'


@functools.cache
def _kept_fields(kind: type[ast.AST]) -> list[str]:
    return [name for name in kind._fields if name not in _DROPPED]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The body of a function in this process. ``from_file`` is False if its code is not what its file says."""

    digest: str | None
    from_file: bool


def loaded(function: Any) -> Loaded:
    """Return the body of the function beneath all decorators of ``function``. Without a source, its digest is None."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return Loaded(None, from_file=False)
    code = function.__code__
    # This is `inspect.getsource` without its search through all loaded modules for the function's own.
    linecache.checkcache(code.co_filename)
    source = _Source(linecache.getlines(code.co_filename, function.__globals__))
    return _loaded(code, code.co_filename, function.__qualname__, source)


class _Source:
    """The lines of a file. Two are equal if they are one list: ``linecache`` makes another when a file has changed."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Source) and self.lines is other.lines

    def __hash__(self) -> int:
        return id(self.lines)


@functools.lru_cache(maxsize=32)  # Several patches have the same target.
def _loaded(code: CodeType, path: str, name: str, source: _Source) -> Loaded:
    """Return the body of ``code``. ``path`` is in the cache's key, since equal code in two files compares equal."""
    lines = source.lines[code.co_firstlineno - 1 :]
    try:
        parsed = _parsed(_block(lines, code), name)
    except (IndexError, SyntaxError, ValueError):
        try:
            parsed = _parsed(inspect.getblock(lines), name)
        except (IndexError, SyntaxError, ValueError, tokenize.TokenError):  # The file has changed since then.
            return Loaded(None, from_file=True)
    definition = next((node for node in ast.walk(parsed) if isinstance(node, _Definition)), None)
    if definition is None:
        return Loaded(None, from_file=False)
    return Loaded(digest(definition), from_file=_same_code(code, parsed))


def _block(lines: list[str], code: CodeType) -> list[str]:
    """Return the lines of the definition that ``lines`` begin with.

    It ends before the first line past its code that is not indented deeper than its first line. ``inspect.getblock``
    finds the same with a tokenizer, which takes as long as all other steps together. A line inside a string or between
    parentheses may be taken for the end, but a definition that is cut off there does not parse.
    """
    depth = len(lines[0]) - len(lines[0].lstrip())
    past = _last_line(code) - code.co_firstlineno + 1
    for number, line in enumerate(lines[past:], past):
        text = line.lstrip()
        if text and text[0] != "#" and len(line) - len(text) <= depth:
            return lines[:number]
    return lines


def _last_line(code: CodeType) -> int:
    lines = (line for _, _, line in code.co_lines() if line is not None)
    return max([*lines, *(_last_line(inner) for inner in code.co_consts if isinstance(inner, CodeType))])


def _parsed(lines: list[str], name: str) -> ast.Module:
    head = ""
    if lines[0][:1].isspace():
        # The class keeps its name, which mangles private names. Dedenting instead would change multi-line strings.
        head = f"class {name.split('.')[-2]}:\n" if "." in name else "if True:\n"
    return parse(head + "".join(lines))


def _same_code(code: CodeType, parsed: ast.Module) -> bool:
    """Compile the file's text again, and return whether the result equals the loaded ``code``."""
    flags = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    module_code = compile(parsed, code.co_filename, "exec", flags=code.co_flags & flags, dont_inherit=True)
    compiled = _find(module_code, code.co_name)
    return compiled is not None and _shape(compiled) == _shape(code)


def _find(code: CodeType, name: str) -> CodeType | None:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            match = const if const.co_name == name else _find(const, name)
            if match is not None:
                return match
    return None


def _shape(code: CodeType) -> tuple[Any, ...]:
    # co_code is left out: a call of an imported name compiles to other instructions if its import is in the same text.
    consts = tuple(_shape(const) if isinstance(const, CodeType) else _constant(const) for const in code.co_consts)
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return arguments, code.co_names, code.co_varnames, code.co_freevars, consts


def _constant(value: Any) -> Any:
    # A set that was read from a .pyc may have another order than the same set just compiled.
    if isinstance(value, frozenset):
        return "frozenset", sorted(map(repr, value))
    return tuple(map(_constant, value)) if isinstance(value, tuple) else repr(value)
