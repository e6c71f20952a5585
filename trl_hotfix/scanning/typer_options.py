"""The option or argument that typer makes of a parameter: of its annotation, its default, and ``typer.Option``."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import click

from ..catalogue.conditions import Argument, Kind
from .budget import literal
from .click_words import literal_of
from .names import dotted_name, follow
from .origins import Evaluate
from .parser_texts import UnclearError
from .scopes import ScopedExpression, source_text
from .typer_annotations import Taken, Whole, defined_by, scalar, taken

OF_HELP = frozenset(["deprecated", "epilog", "help", "hidden", "metavar", "name", "rich_help_panel", "short_help"])
_OF_OPTION = OF_HELP | {"show_choices", "show_default", "show_envvar"}
_OF_PATH = frozenset(["allow_dash", "dir_okay", "exists", "file_okay", "readable", "resolve_path", "writable"])
_OF_NUMBER = frozenset(["max", "min"])
_INFOS = ("typer.Argument", "typer.Option")


class TyperParameter(NamedTuple):
    """A parameter for click, what it takes, and what it has without words. ``option``: that of click."""

    name: str
    option: click.Parameter
    takes: Taken
    default: Argument


def check_keywords(call: ast.Call, known: frozenset[str]) -> None:
    names = [keyword.arg or "**options" for keyword in call.keywords]
    other = next((name for name in names if name not in known), None)
    if other is not None:
        raise UnclearError(f"{source_text(call.func)}() has {other} (line {call.lineno})")


class ParameterReader:
    """Reads one parameter: its annotation, and its default with ``typer.Option`` or ``typer.Argument``."""

    def __init__(self, name: str, line: int, evaluate: Evaluate) -> None:
        self._name, self._line, self._evaluate = name, line, evaluate

    def read(self, annotation: ScopedExpression | None, default: ScopedExpression | None) -> TyperParameter:
        annotation, info = self._without_info(annotation)
        flags = self._flags(info, 0) if info is not None else []
        if default is not None and self._is_info(default):
            if info is not None:
                raise UnclearError(f"{self._name} has two typer.Option (line {self._line})")
            info, flags, default = default, self._flags(default, 1), self._default_of(default)
        value = self._evaluate(default) if default is not None else None
        is_required = value is None or value.value is ...
        takes = self._takes(annotation, value)
        is_argument = _called(info) == "typer.Argument" if info is not None else default is None
        word = self._word(takes, info)
        make = self._argument if is_argument else self._option
        return TyperParameter(
            self._name,
            make(flags, word, takes, required=is_required),
            takes,
            self._default(default, value, takes) if default is not None and value is not None else self._none(),
        )

    def _without_info(
        self, annotation: ScopedExpression | None
    ) -> tuple[ScopedExpression | None, ScopedExpression | None]:
        """Split ``Annotated[float, typer.Option()]``."""
        if annotation is None:
            return None, None
        followed = follow(annotation)
        node = followed.node
        if not isinstance(node, ast.Subscript) or not (dotted_name(followed.with_node(node.value)) or "").endswith(
            ("typing.Annotated", "typing_extensions.Annotated")
        ):
            return annotation, None
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        infos = [followed.with_node(part) for part in parts[1:]]
        if len(infos) != 1 or not self._is_info(infos[0]):
            raise UnclearError(f"the annotation {source_text(node)} is not read (line {node.lineno})")
        return followed.with_node(parts[0]), infos[0]

    def _is_info(self, expression: ScopedExpression) -> bool:
        return _called(expression) in _INFOS

    def _default_of(self, info: ScopedExpression) -> ScopedExpression | None:
        """Return the default in ``typer.Option(0.1, "--beta")``; None if it lacks one."""
        call = info.node
        assert isinstance(call, ast.Call)
        named = [keyword.value for keyword in call.keywords if keyword.arg == "default"]
        given = [*call.args[:1], *named]
        return info.with_node(given[0]) if given else None

    def _flags(self, info: ScopedExpression, first: int) -> list[str]:
        """Return the names of an option. Raises ``UnclearError`` for what it has beside them."""
        call = info.node
        assert isinstance(call, ast.Call)
        known = _OF_OPTION | _OF_PATH | _OF_NUMBER | {"case_sensitive"} | ({"default"} if first else set())
        check_keywords(call, known)
        flags = [self._literal(info.with_node(flag)) for flag in call.args[first:]]
        is_wrong = any(isinstance(argument, ast.Starred) for argument in call.args)
        if is_wrong or not all(isinstance(flag, str) and flag.startswith("-") for flag in flags):
            raise UnclearError(f"{source_text(call)} is not read (line {call.lineno})")
        return flags

    def _literal(self, expression: ScopedExpression) -> Any:
        return literal_of(expression, self._evaluate, self._line)

    def _takes(self, annotation: ScopedExpression | None, value: Argument | None) -> Taken:
        if annotation is not None:
            return taken(annotation)
        if value is not None:
            # typer took the type of the default once, and texts in other releases.
            raise UnclearError(f"{self._name} has no annotation (line {self._line})")
        return scalar(str)

    def _word(self, takes: Taken, info: ScopedExpression | None) -> Any:
        """Return the type of a word, with the limits that an option has."""
        call = info.node if info is not None else None
        keywords = call.keywords if isinstance(call, ast.Call) and info is not None else []
        given = {str(one.arg): info.with_node(one.value) for one in keywords if info is not None}
        limits = {name: self._literal(given[name]) for name in _OF_NUMBER & given.keys()}
        is_sensitive = self._literal(given["case_sensitive"]) if "case_sensitive" in given else True
        if limits and takes.scalar in (int, float):
            return Whole(**limits) if takes.scalar is int else click.FloatRange(**limits)
        if is_sensitive is not True and isinstance(takes.word, click.Choice):
            return click.Choice(takes.word.choices, case_sensitive=False)
        return takes.word

    def _option(self, flags: list[str], word: Any, takes: Taken, *, required: bool) -> click.Parameter:
        name = self._name.replace("_", "-")
        if not flags and name != name.lower():
            raise UnclearError(f"releases of typer differ in the name of {self._name} (line {self._line})")
        is_flag = takes.scalar is bool and not takes.is_list
        own = f"--{name}/--no-{name}" if is_flag else f"--{name}"
        # click 8.0 takes a second flag with the type bool, and not with its own.
        of_flag: dict[str, Any] = {"is_flag": True, "type": bool, "default": None}
        more = of_flag if is_flag else {"multiple": takes.is_list, "type": word}
        return self._built(click.Option, [self._name, *(flags or [own])], required=required, **more)

    def _argument(self, flags: list[str], word: Any, takes: Taken, *, required: bool) -> click.Parameter:
        if flags:
            raise UnclearError(f"the argument {self._name} has names (line {self._line})")
        nargs = -1 if takes.is_list else 1
        return self._built(click.Argument, [self._name], type=word, required=required, nargs=nargs)

    def _built(self, maker: type[click.Parameter], names: list[str], **more: Any) -> click.Parameter:
        try:
            return maker(names, **more)
        except (AttributeError, TypeError, ValueError) as error:
            raise UnclearError(f"click raises {type(error).__name__} (line {self._line})") from None

    def _none(self) -> Argument:
        return Argument(Kind.UNKNOWN, line=self._line, reason=f"{self._name} has no default")

    def _default(self, default: ScopedExpression, value: Argument, takes: Taken) -> Argument:
        """Return what the function is given without words. A default of another type is converted, or refused."""
        node = default.node
        if takes.members:
            if isinstance(node, ast.Attribute) and defined_by(default.with_node(node.value)) is takes.enumeration:
                return literal(takes.members.get(node.attr), self._line)
            return value if value.kind is Kind.LITERAL and value.value is None else self._unknown(node)
        if value.kind is not Kind.LITERAL:
            return Argument(Kind.UNKNOWN, line=self._line, reason=value.reason or source_text(node))
        if takes.is_list:
            fits = isinstance(value.value, list) and all(type(part) is takes.scalar for part in value.value)
            return value if fits else self._unknown(node)
        if takes.scalar is float and type(value.value) is int:
            return literal(float(value.value), value.line)
        return value if value.value is None or type(value.value) is takes.scalar else self._unknown(node)

    def _unknown(self, node: ast.expr) -> Argument:
        return Argument(Kind.UNKNOWN, line=self._line, reason=f"what typer makes of the default {source_text(node)}")


def _called(info: ScopedExpression | None) -> str:
    node = info.node if info is not None else None
    return (dotted_name(info.with_node(node.func)) or "") if isinstance(node, ast.Call) and info is not None else ""
