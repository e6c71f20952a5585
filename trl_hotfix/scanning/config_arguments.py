"""The arguments of a trainer's config, such as ``args=DPOConfig(beta=0.2)``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .names import classes, constructor, follow, parsed_classes
from .own_classes import fields_of
from .scopes import FUNCTIONS, Scope, ScopedExpression, source_text
from .uses import Changes, changes_of, known_value
from .values import keyword_arguments, value_of

_LIBRARIES = ("transformers.", "trl.")
_BESIDE = ("DatasetMixtureConfig", "ModelConfig")


class LocatedArgument(NamedTuple):
    """An argument, and the expression that sets it, if one does. ``changed``: its parts may be others by now."""

    argument: Argument
    expression: ScopedExpression | None
    changed: Argument | None = None


class ConfigArguments:
    """The config of one trainer call.

    An argument is set by an assignment such as ``args.beta = 0.2``, else by a keyword of the call that makes the
    config, else by the default in a class of the script. ``unknown`` stands for all other arguments, if the text does
    not settle which ones are set.
    """

    def __init__(
        self, config: ScopedExpression | None, call: ast.Call, scope: Scope, class_scopes: Mapping[ast.AST, Scope]
    ) -> None:
        self._config, self._scope, self._line = config, scope, call.lineno
        self._class_scopes = class_scopes
        self._arguments: dict[str, ScopedExpression] = {}
        self._changes = changes_of(config) if config is not None else Changes()
        self._changes_by_part = self._changes.by_part()
        self.unknown: Argument | None = None
        self._may_set_any: Argument | None = None
        self._abbreviated: Callable[[str], Argument | None] = lambda name: None
        if config is not None:
            self._read(config)
        change = self._changes.of_any()
        if change is not None:
            self._may_set_any = Argument(Kind.UNKNOWN, line=change.line, reason=change.reason)
        # What may be set again is not known, though it is named.
        self.unknown = self._may_set_any or self.unknown

    def _read(self, config: ScopedExpression) -> None:
        origin = follow(config)
        if isinstance(origin.node, ast.Constant) and origin.node.value is None:
            return
        if isinstance(origin.node, ast.Call) and makes_config(origin):
            self._read_classes(origin.with_node(origin.node.func))
            arguments, unknown = keyword_arguments(origin.node, origin.scope, origin.line)
            self.unknown = self.unknown or unknown
            if origin.node.args:
                # The first is `output_dir`; the order of the others differs between releases.
                reason = f"{source_text(origin.node.args[-1])} is given by position"
                others = len(origin.node.args) > 1 or isinstance(origin.node.args[0], ast.Starred)
                self.unknown = Argument(Kind.UNKNOWN, line=origin.line, reason=reason) if others else self.unknown
            self._arguments.update(arguments)
        elif self._read_command_line(config):
            return
        else:
            value = value_of(config)
            reason = value.reason or source_text(origin.node)
            self.unknown = Argument(Kind.UNKNOWN, line=value.line or self._line, reason=reason)

    def _read_command_line(self, config: ScopedExpression) -> bool:
        """Read the config from the command line, if we have one and one of the usual parsers makes the config."""
        command_line = config.scope.module.command_line
        parsed = parsed_classes(config)
        if command_line is None or parsed is None:
            return False
        configs = [function for function in parsed if any(_is_config(name) for name, _ in classes(function))]
        if len(configs) != 1:
            reason = "the parser makes several configs"
            self.unknown = Argument(Kind.UNKNOWN, line=config.line, reason=reason)
            return True
        self._read_classes(configs[0])
        own = [name for function in parsed for name in fields_of(function)]
        self._abbreviated = partial(command_line.may_set, others=own)
        for name in config.budget.counted(command_line.values):
            self._arguments[name] = config.with_node(command_line.expression(name, config.node))
        return True

    def _read_classes(self, function: ScopedExpression) -> None:
        """Read the defaults in classes of the script. A class of another package may have any."""
        bases = list(classes(function))
        for _, definition in bases:
            if definition is not None:
                self._read_defaults(definition)
        last, _ = bases[-1]
        if not last.startswith(_LIBRARIES):
            self._may_set_any = Argument(Kind.UNKNOWN, line=function.line, reason=f"{last} may set it")

    def _read_defaults(self, definition: ast.ClassDef) -> None:
        """Read ``@dataclass class MyConfig(DPOConfig): padding_free: bool = True``."""
        scope = self._class_scopes[definition]
        self._scope.module.budget.spend(len(definition.body))
        reason = f"{definition.name} may set it"
        unknown = Argument(Kind.UNKNOWN, line=definition.lineno, reason=reason)
        plain = [node for node in definition.body if not _is_field(node) and not _is_text(node)]
        decorators = [source_text(decorator).partition("(")[0] for decorator in definition.decorator_list]
        is_dataclass = bool(decorators) and all(name.rpartition(".")[2] == "dataclass" for name in decorators)
        methods = [node for node in plain if isinstance(node, FUNCTIONS)]
        names = {name for method in methods for name in [method.name, *map(source_text, method.decorator_list)]}
        if (
            (decorators and not is_dataclass)
            or len(methods) < len(plain)
            or constructor(definition) is not None
            or any(name.startswith("__") or not name.isidentifier() for name in names)
            or "property" in names
        ):
            self._may_set_any = unknown
            return
        if not is_dataclass:
            # The constructor is the inherited one, with its own defaults.
            return
        for field in filter(_is_field, definition.body):
            assert isinstance(field, ast.AnnAssign)
            if field.value is not None:
                default = ScopedExpression(field.value, scope, field.lineno)
                self._arguments.setdefault(source_text(field.target), default)

    def locate(self, name: str) -> LocatedArgument | None:
        """Return the argument if the text sets it, to a known value or not; None otherwise."""
        if self._may_set_any is not None:
            return None
        self._scope.module.budget.spend(len(self._changes.changes))
        set_by = [change for change in self._changes_by_part.get(name, ()) if change.inner_part is None]
        expression = self._arguments.get(name)
        if set_by:
            expression = known_value(set_by, self._scope, self._line)
            if expression is None:
                change = set_by[-1]
                return LocatedArgument(Argument(Kind.UNKNOWN, line=change.line, reason=change.reason), None)
        short = self._abbreviated(name) if not set_by else None
        if short is not None:
            return LocatedArgument(replace(short, line=self._line), None)
        if expression is None:
            return None
        within = self._changes.within(name)
        argument = value_of(expression)
        if within is None:
            return LocatedArgument(argument, expression)
        changed = Argument(Kind.UNKNOWN, line=within.line, reason=within.reason)
        is_list = isinstance(argument.value, list) or isinstance(follow(expression).node, (ast.List, ast.Set))
        return LocatedArgument(changed if is_list else argument, expression, changed)


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def makes_config(expression: ScopedExpression) -> bool:
    """Is the expression, or what is assigned to it, a call of a class such as ``DPOConfig``?"""
    origin = follow(expression)
    if not isinstance(origin.node, ast.Call):
        return False
    return any(_is_config(name) for name, _ in classes(origin.with_node(origin.node.func)))


def _is_config(name: str) -> bool:
    """Is this the name of a trainer's config? Those of a model and of datasets are on the command line beside it.

    The other libraries have configs of adapters, models and quantisation.
    """
    last = name.rpartition(".")[2]
    if last.endswith("TrainingArguments"):
        return True
    return last.endswith("Config") and last not in _BESIDE and not name.startswith(("peft.", "transformers."))
