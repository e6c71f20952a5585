"""What in a script reads the command line, and which of its words nothing there reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ..errors import ScriptError, plain
from .bindings import ScriptBindings
from .budget import REASON
from .command_lines import CommandLine
from .found import Unread
from .hydra_mains import given_by_call, given_by_hydra
from .names import PARSING_INTO_CLASSES, parsed_classes
from .own_classes import own_fields
from .scopes import Place, ScopedExpression
from .told_commands import command_of
from .told_parts import PARSING, namespace_of
from .values import value_of

_OTHER_PARSERS = (
    *("absl", "click", "fire", "hydra", "jsonargparse", "omegaconf", "simple_parsing", "typer", "tyro"),
    *("argparse", "sys"),
)
"""Packages that read the command line in ways that the scan does not follow."""


class Reader(NamedTuple):
    """A place that reads the command line, and the words that it does not take.

    ``refused``: why the script ends there. ``unclear``: why the text does not show what it does.
    """

    line: int
    not_used: Sequence[str] = ()
    refused: str = ""
    unclear: str = ""


def tell_command_line(script: ScriptBindings, *, has_file_of_words: bool) -> None:
    """Give the script what transformers' parser makes of its words. Raises ``ScriptError`` for wrong ones.

    ``has_file_of_words``: this parser reads others, which come before.
    """
    methods = {_method(place) for place in _calls_of_hf(script)}
    words = script.module.words
    if words is None or len(methods) != 1 or has_file_of_words:
        return
    reads_config = methods == {"parse_args_and_config"}
    script.module.command_line = CommandLine.parse(words, reads_config=reads_config)


def unread(script: ScriptBindings, file: str) -> list[Unread]:
    """Return the words that nothing reads. Raises ``ScriptError`` if the only parser of the script refuses them."""
    words = script.module.words
    if words is None:
        return []
    readers = script.budget.ask(partial(_readers, script, words), [Reader(1, words, unclear=REASON)])
    if len(readers) == 1 and readers[0].refused:
        (reader,) = readers
        raise ScriptError(
            f"{file}, line {reader.line}: the script refuses the arguments behind --: {plain(reader.refused)}; "
            "expected the command line that it is started with"
        )
    left = [word for word in words if all(word in reader.not_used for reader in readers)]
    why = next((reader for reader in readers if reader.unclear or reader.refused), None)
    other = _other_parser(script)
    reason = f"nothing in {file} reads it"
    if other and not readers:
        reason = f"{file} uses {other}, whose command line the scan does not follow"
    if why is not None:
        reason = f"line {why.line} of {file} reads the command line, and {why.unclear or why.refused}"
    return unread_by_nothing(left, reason)


def _other_parser(script: ScriptBindings) -> str:
    """Return the package by which a script may read its command line, if there is one."""
    scopes = (script.module, *script.scopes.values())
    imported = {
        binding.dotted
        for scope in scopes
        for bindings in scope.bindings.values()
        for binding in bindings
        if binding.dotted
    }
    packages = {dotted.partition(".")[0] for dotted in imported}
    return next((package for package in _OTHER_PARSERS if package in packages), "")


def unread_by_nothing(words: Sequence[str], reason: str) -> list[Unread]:
    """Return each option with its values and the reason."""
    return [Unread(plain(" ".join(option)), reason) for option in _options(words)]


def _options(words: Sequence[str]) -> list[list[str]]:
    """Return each option with its values."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-") and not _is_number(word):
            options.append([word])
        elif options:
            options[-1].append(word)
        else:
            options.append([word])
    return options


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _readers(script: ScriptBindings, words: Sequence[str]) -> list[Reader]:
    return [
        *_of_argparse(script, words),
        *_of_hf(script, words),
        *_of_commands(script, words),
        *_of_settings(script, words),
    ]


def _of_settings(script: ScriptBindings, words: Sequence[str]) -> Iterator[Reader]:
    """Yield what Hydra and OmegaConf read."""
    mains = [
        (getattr(definition, "lineno", 1), given_by_hydra(definition, script.module, value_of))
        for definition in script.scopes
    ]
    merged = [(place.line, given_by_call(_expression(place), value_of)) for place in script.calls]
    for line, given in (*mains, *merged):
        if given is not None and given.reads_words:
            yield Reader(line, words if given.settings is None else (), given.refused, given.unclear)


def _of_commands(script: ScriptBindings, words: Sequence[str]) -> Iterator[Reader]:
    for definition in script.scopes:
        command = command_of(definition, script.module, value_of)
        if command is not None:
            parsed, unclear = command
            left = words if unclear or parsed.refused else ()
            yield Reader(getattr(definition, "lineno", 1), left, parsed.refused, unclear)


def _of_argparse(script: ScriptBindings, words: Sequence[str]) -> Iterator[Reader]:
    for place in script.calls:
        if _method(place) in PARSING:
            namespace = namespace_of(_expression(place), value_of)
            if namespace is not None and namespace.unclear:
                yield Reader(place.line, words, unclear=namespace.unclear)
            elif namespace is not None and namespace.reads_words:
                parsed = namespace.parsed
                yield Reader(place.line, words if parsed.refused else parsed.not_used, refused=parsed.refused)


def _of_hf(script: ScriptBindings, words: Sequence[str]) -> Iterator[Reader]:
    for place in _calls_of_hf(script):
        parsed = parsed_classes(_expression(place))
        command_line = script.module.command_line
        if parsed is None or command_line is None:
            yield Reader(place.line, words, unclear="what it gives its parser cannot be seen")
            continue
        fields = own_fields(parsed)
        names = set() if fields is None else set(command_line.values) - set(fields)
        yield Reader(place.line, [word for option in _options(words) for word in option if _name(option[0]) in names])


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _calls_of_hf(script: ScriptBindings) -> Iterator[Place]:
    """Yield the calls of the parsers of transformers and TRL."""
    for place in script.calls:
        if _method(place) in PARSING_INTO_CLASSES:
            yield place


def _method(place: Place) -> str:
    call = place.node
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def _expression(place: Place) -> ScopedExpression:
    call = place.node
    assert isinstance(call, ast.Call)
    return ScopedExpression(call, place.scope, call.lineno)
