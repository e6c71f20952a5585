"""The calls of TRL's trainers in a script, and the arguments of each: its own, its config's and added callbacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..catalogue.conditions import Argument, Kind, Lookup
from ..matching.hits import TRAINER_ONLY_ARGUMENTS
from .bindings import ScriptBindings
from .config_arguments import ConfigArguments, LocatedArgument, makes_config
from .names import classes, follow
from .scopes import FUNCTIONS, Scope, ScopedExpression, source_text
from .values import UNSET, keyword_arguments, value_of

POSITIONAL_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("BCO", "DPO", "KTO"), ("model", "ref_model")),
    **dict.fromkeys(("GRPO", "RLOO"), ("model", "reward_funcs", "args")),
    **dict.fromkeys(("CPO", "ORPO", "PRM", "Reward", "SFT"), ("model", "args", "data_collator")),
}
"""The positional arguments of each trainer that have the same order in every release."""


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """A call of a trainer. ``name`` is TRL's, without ``Trainer``; ``called`` is the name in the script."""

    name: str
    called: str
    line: int
    argument: Lookup


def trainer_calls(tree: ast.Module) -> Iterator[TrainerCall]:
    """Yield the calls of TRL's trainers, and of classes derived from them, in the order of the file."""
    script = ScriptBindings(tree)
    callbacks = _added_callbacks(script)
    for call, scope in script.calls:
        bases = list(classes(ScopedExpression(call.func, scope, call.lineno)))
        trainers = [name for name, _ in bases if _is_trainer(name)]
        if trainers and not _is_super_init(call.func):
            name = trainers[0].rpartition(".")[2].removesuffix("Trainer")
            definitions = [definition for _, definition in bases if definition is not None]
            arguments = _TrainerArguments(script, call, scope, name, definitions, callbacks.get(call, []))
            yield TrainerCall(name, bases[0][0].rpartition(".")[2], call.lineno, arguments.find)


def _is_trainer(dotted: str) -> bool:
    package, _, name = dotted.rpartition(".")
    return package.split(".")[0] == "trl" and name.endswith("Trainer") and name != "Trainer"


def _is_super_init(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "__init__"


def _added_callbacks(script: ScriptBindings) -> dict[ast.AST, list[ScopedExpression]]:
    """Return the callbacks of ``trainer.add_callback(callback)``, by the call that makes the trainer."""
    callbacks: dict[ast.AST, list[ScopedExpression]] = {}
    for call, scope in script.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_callback" and call.args:
            trainer = follow(ScopedExpression(call.func.value, scope, call.lineno)).node
            callbacks.setdefault(trainer, []).append(ScopedExpression(call.args[0], scope, call.lineno))
    return callbacks


class _TrainerArguments:
    """The arguments of one trainer call.

    ``_unknown`` stands for all arguments that the call does not name, if the text does not tell which ones are set.
    """

    def __init__(
        self,
        script: ScriptBindings,
        call: ast.Call,
        scope: Scope,
        trainer: str,
        definitions: list[ast.ClassDef],
        callbacks: list[ScopedExpression],
    ) -> None:
        self._callbacks = callbacks
        self._arguments, self._unknown = keyword_arguments(call, scope, call.lineno)
        config = self._read_positional(call, scope, trainer)
        self._check_constructors(definitions)
        self._config = ConfigArguments(config, call, scope, script.scopes)

    def _read_positional(self, call: ast.Call, scope: Scope, trainer: str) -> ScopedExpression | None:
        """Name the positional arguments, and return the config."""
        config = self._arguments.get("args")
        names = POSITIONAL_ARGUMENTS.get(trainer, ("model",))
        for position, value in enumerate(call.args):
            expression = ScopedExpression(value, scope, call.lineno)
            if isinstance(value, ast.Starred) or (position >= len(names) and not makes_config(expression)):
                reason = f"{source_text(value)} is given to {trainer}Trainer by position"
                self._unknown = self._unknown or Argument(Kind.UNKNOWN, line=value.lineno, reason=reason)
            elif makes_config(expression) or names[position] == "args":
                config = config or expression
            else:
                self._arguments.setdefault(names[position], expression)
        return config

    def _check_constructors(self, definitions: list[ast.ClassDef]) -> None:
        """A constructor in the script may set any argument that the call does not name."""
        for definition in definitions:
            if any(isinstance(method, FUNCTIONS) and method.name == "__init__" for method in definition.body):
                reason = f"{definition.name}.__init__ may set it"
                self._unknown = self._unknown or Argument(Kind.UNKNOWN, line=definition.lineno, reason=reason)

    def find(self, name: str) -> Argument:
        """Return an argument; ``model.adapter_name`` is an argument of the call that makes ``model``."""
        name, _, part = name.partition(".")
        located = self._locate(name)
        if name == "callbacks" and self._callbacks:
            return self._with_added_callbacks(located.argument)
        return _find_part(located, part) if part else located.argument

    def _locate(self, name: str) -> LocatedArgument:
        """Return the argument of the call; if the call has none, or None, that of the config."""
        expression = self._arguments.get(name)
        if expression is None:
            return self._locate_in_config(name)
        argument = value_of(expression)
        if argument.kind is Kind.LITERAL and argument.value is None:
            in_config = self._locate_in_config(name)
            if in_config.argument.kind is not Kind.UNSET:
                return in_config
        return LocatedArgument(argument, expression)

    def _locate_in_config(self, name: str) -> LocatedArgument:
        located = self._config.locate(name)
        if located is not None:
            return located
        unknown = self._unknown if name in TRAINER_ONLY_ARGUMENTS else self._config.unknown or self._unknown
        return LocatedArgument(unknown or UNSET, None)

    def _with_added_callbacks(self, argument: Argument) -> Argument:
        values = [argument, *(value_of(callback) for callback in self._callbacks)]
        made_by = tuple(name for value in values for name in value.made_by)
        complete = all(value.complete and value.kind is not Kind.UNKNOWN for value in values)
        return Argument(Kind.OBJECT, line=self._callbacks[0].line, made_by=made_by, complete=complete)


def _find_part(located: LocatedArgument, name: str) -> Argument:
    """Return the argument ``name`` of the call that makes an object, or the value of that key in a dict."""
    argument, expression = located
    if argument.kind is Kind.UNKNOWN:
        return argument
    if expression is None or argument.kind is not Kind.OBJECT:
        return UNSET
    origin = follow(expression)
    call = origin.node
    if isinstance(call, ast.Dict):
        call = ast.Call(call, [], [ast.keyword(None, call)])
    if not isinstance(call, ast.Call):
        return Argument(Kind.UNKNOWN, line=argument.line, reason=source_text(call))
    arguments, unknown = keyword_arguments(call, origin.scope, origin.line)
    return value_of(arguments[name]) if name in arguments else unknown or UNSET
