"""TRL's ``ModelConfig``, which a command line fills: its texts, and what TRL makes of it: configs of adapters."""

from __future__ import annotations

import ast

from ..catalogue.conditions import UNSET, Argument, Kind
from .command_lines import CommandLine
from .names import classes, dotted_name, parsed_classes
from .scopes import ScopedExpression, source_text
from .uses import changes_of

_TEXTS = ("model_name_or_path", "model_revision")
"""Its arguments that are texts: a trainer without them ends with an error."""

_MADE = {
    "get_peft_config": (("use_peft",), "peft.LoraConfig"),
    "get_quantization_config": (("load_in_4bit", "load_in_8bit"), "transformers.BitsAndBytesConfig"),
}
"""Functions of TRL that return an object if one of these arguments is on, and None otherwise."""


def text_of_model_config(expression: ScopedExpression) -> Argument | None:
    """Return some text for ``model_args.model_name_or_path`` of a command line; None for other expressions."""
    node = expression.node
    if not isinstance(node, ast.Attribute) or node.attr not in _TEXTS:
        return None
    owner = expression.with_node(node.value)
    parsed = parsed_classes(owner) or []
    names = {name for function in parsed for name, _ in classes(function)}
    if "trl.ModelConfig" not in names or changes_of(owner).changes:
        return None
    return Argument(Kind.OBJECT, line=node.lineno, made_by=("str",))


def made_of_model_config(expression: ScopedExpression) -> Argument | None:
    """Return what ``get_peft_config(model_args)`` returns, an object or None; None for other calls."""
    call = expression.node
    name = _function(expression)
    if name is None or not isinstance(call, ast.Call):
        return None
    switches, made_by = _MADE[name]
    made, nothing = (
        Argument(Kind.OBJECT, line=call.lineno, made_by=(made_by,)),
        Argument(Kind.LITERAL, line=call.lineno),
    )
    told = _told(expression, call)
    on = [told.switch(switch) for switch in switches] if told is not None else [None]
    if True in on:
        return made
    reason = f"what {source_text(call.func)}() returns is not in the text"
    unknown = Argument(Kind.UNKNOWN, line=call.lineno, reason=reason, alternatives=(nothing, made))
    return unknown if None in on else nothing


def part_of_made(expression: ScopedExpression, name: str) -> Argument | None:
    """Return ``use_dora`` of what ``get_peft_config(model_args)`` returns; None for other calls."""
    call = expression.node
    if _function(expression) is None or not isinstance(call, ast.Call):
        return None
    told = _told(expression, call)
    if told is None:
        return Argument(Kind.UNKNOWN, line=call.lineno, reason=f"{name} is of the command line")
    names = (name, f"lora_{name}")
    given = [told.values.get(one) or told.may_set(one) for one in names]
    return next(filter(None, given), UNSET)


def _function(expression: ScopedExpression) -> str | None:
    call = expression.node
    dotted = dotted_name(expression.with_node(call.func)) if isinstance(call, ast.Call) else None
    package, _, name = (dotted or "").rpartition(".")
    return name if package.split(".")[0] == "trl" and name in _MADE else None


def _told(expression: ScopedExpression, call: ast.Call) -> CommandLine | None:
    """Return the command line that the user told, if it fills what the call gets."""
    given = [expression.with_node(value) for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    is_parsed = len(given) == 1 and parsed_classes(given[0]) is not None and not changes_of(given[0]).changes
    return expression.scope.module.command_line if is_parsed else None
