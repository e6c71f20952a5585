"""A YAML file as OmegaConf reads it: its values by their paths, and where each stands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..catalogue.conditions import Argument, Kind
from ..errors import ScriptError, plain
from . import told_files, yaml_files
from .beside import roots
from .budget import literal
from .parser_texts import UnclearError

_EXPECTED = "a config of OmegaConf, a mapping such as 'beta: 0.1'"
_MOST_REFERENCES = 20
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")
MISSING = "???"
"""What OmegaConf takes for a value that has to be given."""

Keys = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """Reads ``1e-5`` as a number and a date as a text, and refuses a key that comes twice, as OmegaConf does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
        if len(set(keys)) < len(keys):
            raise yaml.constructor.ConstructorError("", node.start_mark, "a key comes twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:
         [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
        |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


class Settings(NamedTuple):
    """The values of a file, with those of the command line. ``untold``: a command line that nobody told may set more.

    ``places`` has the places of the values by their paths.
    """

    file: str
    values: dict[str, Any]
    places: dict[Keys, str]
    untold: bool = False

    def at(self, path: Sequence[str]) -> Any:
        """Return the value at a path. Raises ``KeyError``."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, dict):
                raise KeyError(key)
            value = value[key]
        return value

    def place(self, path: Sequence[str]) -> str:
        return self.places.get(tuple(path), self.file)

    def reference(self, path: Keys) -> Keys | None:
        """Return the path to which ``${trainer.beta}`` leads. None if the file does not show where it leads."""
        for _ in range(_MOST_REFERENCES):
            value = self.at(path)
            if not isinstance(value, str) or "${" not in value:
                return path
            match = _REFERENCE.fullmatch(value)
            if match is None:
                return None
            path = tuple(match[1].split("."))
        return None

    def argument(self, path: Keys, line: int, *, is_plain: bool) -> Argument:
        """Return the value at a path. ``is_plain``: a list is one of Python, and not one of OmegaConf."""
        unknown = Argument(Kind.UNKNOWN, line=line, reason=f"{'.'.join(path)} is not in {self.file}")
        try:
            found = self.reference(path)
            value = self.at(found) if found is not None else None
        except KeyError:
            return unknown
        name = f"{'.'.join(path)} of {self.file}"
        if found is None:
            return Argument(Kind.UNKNOWN, line=line, reason=f"{name} is made when the script runs")
        if value == MISSING or (isinstance(value, str) and "${" in value):
            return Argument(Kind.UNKNOWN, line=line, reason=f"{name} is missing")
        if is_scalar(value) or (is_plain and isinstance(value, list) and all(map(_is_fixed, value))):
            argument = literal(value, line)
            return Argument(argument.kind, argument.value, line, argument.made_by, place=self.place(found))
        if is_plain and isinstance(value, dict):
            return Argument(Kind.OBJECT, line=line, made_by=("dict",), place=self.place(found))
        return Argument(Kind.UNKNOWN, line=line, reason=f"{name} is no plain value")


def is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, float, int, str))


def _is_fixed(value: Any) -> bool:
    return is_scalar(value) and not (isinstance(value, str) and (value == MISSING or "${" in value))


def load(path: Path, script: Path) -> Settings:
    """Read a file of the project of a script. Raises ``UnclearError``."""
    path = Path(os.path.normpath(path))
    shown = plain(os.path.relpath(path, script.parent))
    if not any(path.is_relative_to(folder) for folder in (*roots(script), Path.cwd())):
        raise UnclearError(f"{shown} is not in the project of the script")
    try:
        source = told_files.read(path, yaml_files.LARGEST, _EXPECTED)
        root, values = yaml_files.load(source, shown, _EXPECTED, _Loader)
    except ScriptError as error:
        raise UnclearError(f"{str(error).partition(';')[0]}") from None
    if b"@package" in source:
        # It tells Hydra to put the values elsewhere.
        raise UnclearError(f"{shown} has @package")
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise UnclearError(f"{shown} has no mapping")
    places = {keys: f"{shown}, line {line}" for keys, line in _lines(root, ())}
    return Settings(shown, values, places)


def scalar_of(text: str) -> Any:
    """Return what a word is as YAML, if that is one value. Raises ``UnclearError``."""
    try:
        value = yaml_files.load(text, "a word", _EXPECTED, _Loader)[1]
    except ScriptError:
        raise UnclearError(f"{plain(text)} is not YAML") from None
    if not _is_fixed(value) or not text.strip():
        raise UnclearError(f"{plain(text)} is no plain value")
    return value


def _lines(node: yaml.MappingNode, above: Keys) -> Iterator[tuple[Keys, int]]:
    """Yield the path and the line of each value. An alias is where its anchor is."""
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            keys = (*above, key.value)
            yield keys, key.start_mark.line + 1
            if isinstance(value, yaml.MappingNode) and value.start_mark.line >= key.start_mark.line:
                yield from _lines(value, keys)


def nested(value: Any) -> Mapping[str, Any]:
    """Return the values of a mapping that are no single values."""
    return {key: part for key, part in value.items() if not is_scalar(part)} if isinstance(value, dict) else {}
