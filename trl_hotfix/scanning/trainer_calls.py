"""The calls of TRL's trainers in a script, and the arguments of each: its own, its config's and added callbacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import NamedTuple

from msgspec.structs import replace

from ..catalogue.conditions import UNSET, Argument, Kind
from ..matching.hits import TRAINER_ONLY_ARGUMENTS
from .beside import Foreign
from .bindings import ScriptBindings
from .budget import REASON, too_large
from .config_arguments import ConfigArguments, LocatedArgument, makes_config
from .elsewhere import SetElsewhere
from .found import TrainerCall, Trainers, Unseen
from .harmless import is_pure_method_of_model
from .indirect import Target, target
from .model_config import part_of_made
from .names import classes, follow, trainer_names
from .rewards import rewards_of
from .scopes import Place, ScopedExpression, source_text
from .script_datasets import script_dataset_facts
from .uses import changes_of
from .values import keyword_arguments, value_of

POSITIONAL_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("BCO", "DPO", "KTO"), ("model", "ref_model")),
    **dict.fromkeys(("GRPO", "RLOO"), ("model", "reward_funcs", "args")),
    **dict.fromkeys(("CPO", "ORPO", "PRM", "Reward", "SFT"), ("model", "args", "data_collator")),
}
"""The positional arguments of each trainer that have the same order in every release."""


def trainer_calls(script: ScriptBindings) -> Trainers:
    """Return the calls of TRL's trainers, and of classes derived from them, in the order of the file."""
    found: list[TrainerCall] = []
    untold: list[int] = []
    for place in script.calls:
        call = script.budget.ask(partial(_trainer_call, script, place), place.line)
        if isinstance(call, TrainerCall):
            found.append(call)
        elif call is not None:
            untold.append(call)
    if not untold:
        return Trainers(found, [])
    return Trainers(found, [Unseen(untold[0], f"{REASON}: {len(untold)} calls may make a trainer of TRL")])


def _trainer_call(script: ScriptBindings, place: Place) -> TrainerCall | None:
    call = place.node
    assert isinstance(call, ast.Call)
    if _is_super_init(call.func):
        return None
    aim = target(ScopedExpression(call.func, place.scope, call.lineno))
    trainers = trainer_names(aim.function)
    foreign = script.beside.trainer(aim.function) if script.beside is not None and not trainers else None
    trainers = foreign.trainers if foreign is not None else trainers
    if not trainers:
        return None
    script.followed |= aim.passed
    name = trainers[0].rpartition(".")[2].removesuffix("Trainer")
    called = next(classes(aim.function))[0].rpartition(".")[2]
    questions = _Questions(script, place, aim, name, foreign)
    return TrainerCall(name, called, call.lineno, questions.argument, facts=questions.facts)


class _Questions:
    """The questions about the arguments of one call: each is asked once, and takes no more steps than it may."""

    def __init__(
        self, script: ScriptBindings, place: Place, aim: Target, trainer: str, foreign: Foreign | None
    ) -> None:
        self._ask, self._line = script.budget.ask, place.line
        self._read = partial(_TrainerArguments, script, place, aim, trainer, foreign)
        self._answers: dict[str, Argument] = {}

    @cached_property
    def _arguments(self) -> _TrainerArguments | None:
        return self._ask(self._read, None)

    def argument(self, name: str) -> Argument:
        """Return an argument, by the names that ``_TrainerArguments.find`` knows."""
        arguments, unknown = self._arguments, too_large(self._line)
        if name not in self._answers:
            self._answers[name] = unknown if arguments is None else self._ask(partial(arguments.find, name), unknown)
        return self._answers[name]

    def facts(self) -> Mapping[str, Argument]:
        """Return what the script shows of the dataset."""
        arguments = self._arguments
        return self._ask(arguments.facts, {}) if arguments is not None else {}


def _is_super_init(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "__init__"


class _AddedCallback(NamedTuple):
    """The callback of ``trainer.add_callback(callback)``. It may not be added in a branch, or to another trainer."""

    call: Place
    callback: ScopedExpression
    is_certain: bool


def _added_callbacks(calls: list[Place], maker: ast.Call) -> Iterator[_AddedCallback]:
    """Yield the callbacks that are added, where ``maker`` makes the trainer."""
    for place, call in _calls_of(calls, "add_callback"):
        assert isinstance(call.func, ast.Attribute)
        if call.args:
            trainer = follow(ScopedExpression(call.func.value, place.scope, place.line))
            certain = trainer.node is maker and place.unconditional and trainer.scope is place.scope
            yield _AddedCallback(place, ScopedExpression(call.args[0], place.scope, place.line), certain)


def _calls_of(calls: list[Place], method: str) -> Iterator[tuple[Place, ast.Call]]:
    for place in calls:
        call = place.node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == method:
            yield place, call


class _TrainerArguments:
    """The arguments of one trainer call.

    ``_unknown`` stands for all arguments that the call does not name, if the text does not settle which ones are set.
    """

    def __init__(
        self, script: ScriptBindings, place: Place, aim: Target, trainer: str, foreign: Foreign | None
    ) -> None:
        call = place.node
        assert isinstance(call, ast.Call)
        self._arguments: dict[str, ScopedExpression] = {}
        self._unknown: Argument | None = None
        given: list[ScopedExpression] = []
        for layer in (*aim.partials, ScopedExpression(call, place.scope, call.lineno)):
            made = layer.node
            assert isinstance(made, ast.Call)
            arguments, unknown = keyword_arguments(made, layer.scope, layer.line)
            self._arguments |= arguments
            self._unknown = self._unknown or unknown
            # The first one of ``partial`` is the trainer.
            given += [layer.with_node(value) for value in (made.args if made is call else made.args[1:])]
        config = self._read_positional(given, trainer)
        self._config = ConfigArguments(config, call, place.scope, script.scopes)
        self._set_elsewhere = SetElsewhere(script, place, aim.function, foreign)
        self._callbacks = [*_added_callbacks(self._set_elsewhere.calls, call)]

    def _read_positional(self, given: list[ScopedExpression], trainer: str) -> ScopedExpression | None:
        """Name the positional arguments, and return the config."""
        config = self._arguments.get("args")
        names = POSITIONAL_ARGUMENTS.get(trainer, ("model",))
        for position, expression in enumerate(given):
            value = expression.node
            if isinstance(value, ast.Starred) or (position >= len(names) and not makes_config(expression)):
                reason = f"{source_text(value)} is given to {trainer}Trainer by position"
                self._unknown = self._unknown or Argument(Kind.UNKNOWN, line=value.lineno, reason=reason)
            elif makes_config(expression) or names[position] == "args":
                config = config or expression
            else:
                self._arguments.setdefault(names[position], expression)
        return config

    def find(self, name: str) -> Argument:
        """Return an argument; ``model.adapter_name`` is an argument of the call that makes ``model``.

        ``train.resume_from_checkpoint`` is the argument of ``trainer.train()``, and ``reward_funcs.rewards`` what the
        text of the reward functions tells.
        """
        name, _, part = name.partition(".")
        elsewhere = self._set_elsewhere.argument(name, of_config=name not in TRAINER_ONLY_ARGUMENTS)
        if elsewhere is not None:
            return elsewhere
        if name == "train":
            return _resumed_from(self._set_elsewhere.calls)
        if name == "reward_funcs" and part == "rewards" and name in self._arguments:
            return rewards_of(self._arguments[name])
        located = self._locate(name)
        if name == "callbacks" and self._callbacks:
            return self._with_added_callbacks(located.argument)
        return _find_part(located, part) if part else located.argument

    def facts(self) -> dict[str, Argument]:
        """Return the facts of the dataset, if the script makes it and nothing else sets it."""
        dataset = self._arguments.get("train_dataset")
        if dataset is None or self._set_elsewhere.argument("train_dataset", of_config=False) is not None:
            return {}
        return script_dataset_facts(dataset)

    def _locate(self, name: str) -> LocatedArgument:
        """Return the argument of the call; if the call lacks it, or has None, that of the config."""
        expression = self._arguments.get(name)
        if expression is None:
            return self._locate_in_config(name)
        argument = value_of(expression)
        if any(value.kind is Kind.LITERAL and value.value is None for value in (argument, *argument.alternatives)):
            in_config = self._locate_in_config(name)
            if in_config.argument.kind is not Kind.UNSET:
                # Instead of the None that it may be, that of the config counts.
                may_be_none = LocatedArgument(replace(argument, alternatives=()), expression)
                return may_be_none if argument.alternatives else in_config
        return LocatedArgument(argument, expression)

    def _locate_in_config(self, name: str) -> LocatedArgument:
        located = self._config.locate(name)
        if located is not None:
            return located
        unknown = self._unknown if name in TRAINER_ONLY_ARGUMENTS else self._config.unknown or self._unknown
        return LocatedArgument(unknown or UNSET, None)

    def _with_added_callbacks(self, argument: Argument) -> Argument:
        certain = [value_of(added.callback) for added in self._callbacks if added.is_certain]
        if certain:
            argument = _together([argument, *certain])
        uncertain = [added for added in self._callbacks if not added.is_certain]
        if not uncertain:
            return argument
        place = uncertain[0].call
        unknown = Argument(Kind.UNKNOWN, line=place.line, reason=f"{source_text(place.node)} may add one")
        values = [value_of(added.callback) for added in uncertain]
        if Kind.UNKNOWN in {value.kind for value in (argument, *values)}:
            return unknown
        # Without any, with each of them alone, and with all: what holds of all of these holds of what is between.
        possible = [argument, *(_together([argument, value]) for value in values), _together([argument, *values])]
        return replace(unknown, alternatives=tuple(possible))


def _together(values: list[Argument]) -> Argument:
    """Return the list of several objects. The first may be None or a list."""
    made_by = tuple(name for value in values for name in value.made_by)
    complete = all(value.complete and value.kind is not Kind.UNKNOWN for value in values)
    return Argument(Kind.OBJECT, line=values[-1].line, made_by=made_by, complete=complete)


def _resumed_from(calls: list[Place]) -> Argument:
    """Return ``resume_from_checkpoint`` of the calls of ``trainer.train()``. False is as good as not given."""
    values = [(place, _resume_argument(call, place)) for place, call in _calls_of(calls, "train")]
    if not values:
        return Argument(Kind.UNKNOWN, reason="train() is not called in this file")
    given = [(place, value) for place, value in values if value.kind is not Kind.UNSET]
    if not given:
        return UNSET
    place, value = given[0]
    if len(values) == 1 and place.unconditional:
        return value
    return Argument(Kind.UNKNOWN, line=place.line, reason=f"{source_text(place.node)} may not be called")


def _resume_argument(call: ast.Call, place: Place) -> Argument:
    arguments, unknown = keyword_arguments(call, place.scope, place.line)
    expression = arguments.get("resume_from_checkpoint")
    if call.args and not isinstance(call.args[0], ast.Starred):
        expression = ScopedExpression(call.args[0], place.scope, place.line)
    elif call.args:
        unknown = Argument(Kind.UNKNOWN, line=place.line, reason=source_text(call))
    if expression is None:
        return unknown or UNSET
    value = value_of(expression)
    # 0 equals False, and is another argument.
    is_false = value.kind is Kind.LITERAL and (value.value is None or value.value is False)
    # What may be False may not be given.
    return UNSET if is_false else replace(value, alternatives=())


def _find_part(located: LocatedArgument, name: str) -> Argument:
    """Return the argument ``name`` of the call that makes an object, or the value of that key in a dict."""
    argument, expression, changed = located
    if argument.kind is Kind.UNKNOWN:
        # What the object may be does not tell its parts.
        return replace(argument, alternatives=())
    if expression is None or argument.kind is not Kind.OBJECT:
        return UNSET
    if changed is not None:
        return changed
    origin = follow(expression)
    call = origin.node
    if isinstance(call, ast.Dict):
        call = ast.Call(call, [], [ast.keyword(None, expression.node)])
        origin = expression
    if not isinstance(call, ast.Call):
        return Argument(Kind.UNKNOWN, line=argument.line, reason=source_text(call))
    made = part_of_made(origin, name)
    arguments, unknown = keyword_arguments(call, origin.scope, origin.line)
    changes = changes_of(expression, is_pure_method_of_model)
    change = changes.of_any() or next(iter(changes.by_part().get(name, ())), None)
    if change is not None and origin is not expression:
        return Argument(Kind.UNKNOWN, line=change.line, reason=change.reason)
    if made is not None:
        return made
    return value_of(arguments[name]) if name in arguments else unknown or UNSET
