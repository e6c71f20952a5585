"""The command line of a script whose parser is transformers' ``HfArgumentParser`` or TRL's ``TrlParser``."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from ..errors import ScriptError, plain
from . import told_files, yaml_files
from .budget import literal

_EXPECTED = "the config of a command line (--config), a mapping such as 'packing: true'"

_LONGEST_NUMBER = 100
"""A word with more characters is no number and no truth value."""

_SWITCHES = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}
"""The words that the parser takes for a truth value, in capitals too, if the option is one."""

_BEGINNINGS = frozenset(["gradient_checkpointing", "packing"])
"""Options of TRL that others begin with. The parser takes them for themselves."""


class ToldConstant(ast.Constant):
    """A value of the command line."""

    argument: Argument


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The arguments that a script is started with, by their names with underscores."""

    values: Mapping[str, Argument]

    @classmethod
    def parse(cls, words: Sequence[str], *, reads_config: bool = True) -> CommandLine:
        """Parse ``--beta 0.1 --packing --no_bf16 --config c.yaml``. Raises ``ScriptError``.

        What the command line says comes before what the config says. Without ``reads_config``, ``--config`` is an
        option such as any other.
        """
        given: dict[str, list[str]] = {}
        name = ""
        for word in words:
            if word.startswith("--"):
                name, equals, text = word[2:].partition("=")
                name = name.replace("-", "_")
                given[name] = [text] if equals else []
            elif not name:
                raise ScriptError(f"expected options such as --beta 0.1 behind --, found {plain(word)}")
            else:
                given[name].append(word)
        config = given.pop("config", None) if reads_config else None
        switched_off = [name for name in given if name.startswith("no_") and not given[name]]
        values = {name: _of_words(words) for name, words in given.items() if name not in switched_off}
        values |= {name.removeprefix("no_"): literal(False, None) for name in switched_off}
        values = {name: replace(value, place="the command line") for name, value in values.items()}
        return cls({**(_read(Path(config[-1])) if config else {}), **values})

    def expression(self, name: str, node: ast.AST) -> ast.expr:
        """Return the value of an argument as an expression in the place of ``node``."""
        return _expression(self.values[name], node)

    def switch(self, name: str) -> bool | None:
        """Return whether a switch that is off by default is on, or None if the words do not tell."""
        if name not in self.values:
            return None if self.may_set(name) is not None else False
        value = self.values[name]
        known = (one.value for one in (value, *value.alternatives) if isinstance(one.value, (bool, int)))
        return next(map(bool, known), None)

    def may_set(self, name: str, others: Collection[str] = ()) -> Argument | None:
        """Return the argument that an abbreviation may set, such as ``--grad`` for ``gradient_checkpointing``.

        ``others`` are options of the script that are no abbreviations.
        """
        if name in self.values:
            return None
        for given in self.values.keys() - _BEGINNINGS - set(others):
            if name.startswith(given) or (given.startswith("no_") and f"no_{name}".startswith(given)):
                return Argument(Kind.UNKNOWN, reason=f"--{given} may be short for it", place="the command line")
        return None


def _expression(argument: Argument, node: ast.AST) -> ast.expr:
    if isinstance(argument.value, dict):
        parts = {key: replace(literal(part, None), place=argument.place) for key, part in argument.value.items()}
        keys: list[ast.expr | None] = [ast.copy_location(ast.Constant(str(key)), node) for key in parts]
        return ast.copy_location(ast.Dict(keys, [_expression(part, node) for part in parts.values()]), node)
    constant = ast.copy_location(ToldConstant(argument.value), node)
    constant.argument = argument
    return constant


def texts(words: Sequence[str]) -> list[str]:
    """Return the words, and the texts of the YAML files that they name."""
    paths = [Path(word.rpartition("=")[2]) for word in words if word.endswith((".yaml", ".yml"))]
    return [*words, *(told_files.read_text(path, yaml_files.LARGEST, _EXPECTED) for path in paths if path.is_file())]


def of_text(text: str) -> Argument:
    """Return what a text of a config stands for. The parser makes what the option is: a truth value, a number."""
    switch = _SWITCHES.get(text.lower())
    possible = [text, *([switch] if switch is not None else []), *_numbers(text)]
    return _one_of(possible, "it is a text")


def _of_words(words: Sequence[str]) -> Argument:
    """Return what the parser makes of the words behind an option; none is a switch."""
    if not words:
        return literal(True, None)
    word, *others = words
    switch = _SWITCHES.get(word.lower())
    if others and (switch is None or next(_numbers(word), None) is not None):
        return literal([next(_numbers(one), one) for one in words], None)
    # A switch takes one word, and the parser hands the others back.
    if word.lower() in ("true", "false"):
        return literal(switch, None)
    if word.startswith("{"):
        return _of_json(word)
    number = next(_numbers(word), None)
    if number is not None:
        return literal(number, None)
    return _one_of([word, *([switch] if switch is not None else [])], f"{word} is a text or a truth value")


def _numbers(text: str) -> Iterator[float]:
    for kind in (int, float) if len(text) <= _LONGEST_NUMBER else ():
        try:
            yield kind(text)
        except ValueError:
            continue


def _one_of(possible: list[Any], reason: str) -> Argument:
    arguments = tuple(literal(value, None) for value in possible)
    return arguments[0] if len(arguments) == 1 else Argument(Kind.UNKNOWN, reason=reason, alternatives=arguments)


def _of_json(word: str) -> Argument:
    """Return the mapping that transformers reads of a word for an option such as ``--model_init_kwargs``."""
    try:
        return literal(json.loads(word), None)
    except (ValueError, RecursionError):
        return literal(word, None)


def _read(path: Path) -> dict[str, Argument]:
    """Return the values of a config."""
    file = plain(str(path))
    root, values = yaml_files.load(told_files.read(path, yaml_files.LARGEST, _EXPECTED), file, _EXPECTED)
    if not isinstance(values, dict):
        raise ScriptError(f"{file} has no mapping, but {told_files.kind_of(values)}; expected {_EXPECTED}")
    pairs = root.value if isinstance(root, yaml.MappingNode) else ()
    places = {str(key.value): f"{file}, line {key.start_mark.line + 1}" for key, _ in pairs}
    arguments = {
        str(key): of_text(value) if isinstance(value, str) else literal(value, None) for key, value in values.items()
    }
    return {name: replace(argument, place=places.get(name, "")) for name, argument in arguments.items()}
