"""What sets an argument of a trainer besides its call and its config: its class, its later uses, patched modules."""

from __future__ import annotations

import ast

from ..catalogue.conditions import Argument, Kind
from .beside import Foreign
from .bindings import ScriptBindings
from .budget import Budget
from .harmless import is_pure_method_of_trainer
from .imported_files import set_by_imports
from .names import classes, constructor
from .scopes import FUNCTIONS, Place, ScopedExpression, source_text
from .uses import Changes, changes_of, changes_of_result

_CONFIGS = ("Config", "TrainingArguments")


class SetElsewhere:
    """The arguments of one trainer call that something else than the call and its config may set.

    The key None stands for all arguments.
    """

    def __init__(
        self, script: ScriptBindings, place: Place, function: ScopedExpression, foreign: Foreign | None
    ) -> None:
        self._config: dict[str | None, Argument] = {}
        self._trainer: dict[str | None, Argument] = {}
        self._script, self._budget = script, place.scope.module.budget
        self._classes: list[str] = []
        self.calls: list[Place] = []
        """The calls of the trainer's methods in the script, such as ``trainer.train()``."""
        if script.dynamic is not None:
            self._add(None, script.dynamic.lineno, f"{source_text(script.dynamic.func)}() may set it")
        for name, definition in classes(function):
            self._classes.append(name.rpartition(".")[2])
            if definition is not None:
                self._read_class(script, definition)
        if foreign is not None and foreign.may_set:
            self._add(None, place.line, f"{self._classes[0]} of {foreign.file.name} may set it")
        changes = changes_of_result(place, is_pure_method_of_trainer)
        self._read_changes(changes)
        self.calls += changes.calls

    def argument(self, name: str, *, of_config: bool) -> Argument | None:
        """Return the unknown argument if it may be set elsewhere, and None if it is not."""
        for names in (self._trainer, self._config if of_config else {}):
            unknown = names.get(name) or names.get(None)
            if unknown is not None:
                return unknown
        return self._set_on_class(name, of_config=of_config)

    def _set_on_class(self, name: str, *, of_config: bool) -> Argument | None:
        """Return the unknown argument if the script or a file that it imports sets it on a class, or the class."""
        here, elsewhere = self._script.set_on_modules, set_by_imports(self._script)
        configs = [key for key in (*here, *elsewhere) if key.endswith(_CONFIGS)] if of_config else []
        for key in (name, "__dict__", "__init__", "__new__", *self._classes, *configs):
            if key in here:
                reason = f"{key} is set on a class or a module"
                return Argument(Kind.UNKNOWN, line=here[key], reason=reason)
            if key in elsewhere:
                file, line = elsewhere[key]
                return Argument(Kind.UNKNOWN, line=line, reason=f"{file} sets {key} on a class or a module")
        return None

    def _add(self, name: str | None, line: int, reason: str) -> None:
        self._trainer.setdefault(name, Argument(Kind.UNKNOWN, line=line, reason=reason))

    def _read_changes(self, changes: Changes) -> None:
        """Read the changes of the trainer, such as ``trainer.args.beta = 1`` and ``trainer.ref_model = x``."""
        for change in changes.changes:
            unknown = Argument(Kind.UNKNOWN, line=change.line, reason=change.reason)
            if change.part == "args":
                self._config.setdefault(change.inner_part, unknown)
            elif change.part is None or change.inner_part is None:
                self._trainer.setdefault(change.part, unknown)
        for part, change in changes.handed_out.items():
            if part in ("args", "*"):
                self._config.setdefault(None, Argument(Kind.UNKNOWN, line=change.line, reason=change.reason))
            if part in ("train", "*"):
                self._add("train", change.line, change.reason)

    def _read_class(self, script: ScriptBindings, definition: ast.ClassDef) -> None:
        own = constructor(definition)
        reason = f"{definition.name}.__init__ may set it"
        if own is not None and not hands_on_all(own, self._budget):
            self._add(None, definition.lineno, reason)
        for method in self._budget.counted(definition.body):
            if isinstance(method, FUNCTIONS) and method.name == "train":
                self._add("train", method.lineno, f"{definition.name}.train may set it")
            if isinstance(method, FUNCTIONS) and method.args.args:
                scope = script.scopes[method]
                itself = ast.Name(method.args.args[0].arg, ast.Load(), lineno=method.lineno)
                changes = changes_of(ScopedExpression(itself, scope, method.lineno), _is_read_too)
                self._read_changes(changes)


def _is_read_too(method: str) -> bool:
    """What a method of the class calls on itself is a method that is read too, or one of TRL's."""
    return True


def hands_on_all(own: ast.FunctionDef, budget: Budget) -> bool:
    """Does a constructor hand all of its arguments on, as in ``super().__init__(*args, **kwargs)``, and no other?"""
    parameters = own.args
    if own.name != "__init__" or parameters.vararg is None or parameters.kwarg is None or len(parameters.args) != 1:
        return False
    names = [parameters.vararg.arg, parameters.kwarg.arg]
    nodes = list(budget.counted(ast.walk(own)))
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id in names]
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_super_init(node.func)]
    if len(calls) != 1 or len(uses) != 2:
        return False
    (call,) = calls
    if len(call.args) != 1 or len(call.keywords) != 1:
        return False
    return [source_text(argument) for argument in call.args] == [f"*{names[0]}"] and [
        (keyword.arg, source_text(keyword.value)) for keyword in call.keywords
    ] == [(None, names[1])]


def _is_super_init(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and source_text(function) == "super().__init__"
