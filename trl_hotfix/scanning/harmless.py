"""What is known to leave an object as it was: functions, methods, and the statements around a name."""

from __future__ import annotations

import ast

from .names import dotted_name
from .scopes import Place, ScopedExpression, called_name

PURE_FUNCTIONS = frozenset(
    [
        "all",
        "any",
        "asdict",
        "bool",
        "dir",
        "float",
        "format",
        "hasattr",
        "id",
        "int",
        "isinstance",
        "issubclass",
        "len",
        "max",
        "min",
        "pprint",
        "print",
        "repr",
        "str",
        "sum",
        "type",
    ]
)
"""Functions that change no argument, and return nothing that changes with it. By their last name."""

COPYING_FUNCTIONS = frozenset(["copy", "deepcopy", "dict", "list", "replace", "set", "sorted", "tuple"])
"""Functions that return another object with the same parts."""

PURE_METHODS = frozenset(
    [
        "count",
        "get_process_log_level",
        "get_warmup_steps",
        "index",
        "keys",
        "to_dict",
        "to_json_string",
        "to_sanitized_dict",
    ]
)
"""Methods of dicts, lists and configs that change nothing, and hand out no part that can be changed."""

_METHODS_OF_TRAINERS = frozenset(
    [
        "add_callback",
        "create_model_card",
        "evaluate",
        "generate_completions",
        "init_hf_repo",
        "is_local_process_zero",
        "is_world_process_zero",
        "log",
        "log_metrics",
        "metrics_format",
        "num_examples",
        "predict",
        "push_to_hub",
        "save_metrics",
        "save_model",
        "save_state",
        "train",
    ]
)
COPYING_METHODS = frozenset(["copy", "get", "items", "values"])
_LOGGING_METHODS = frozenset(["critical", "debug", "error", "exception", "info", "log", "warning"])

_METHODS_OF_MODELS = frozenset(
    [
        "cpu",
        "cuda",
        "eval",
        "train",
        "requires_grad_",
        "gradient_checkpointing_enable",
        "enable_input_require_grads",
        "print_trainable_parameters",
        "num_parameters",
        "parameters",
        "named_parameters",
        "get_memory_footprint",
        "save_pretrained",
        "push_to_hub",
        "resize_token_embeddings",
        "modules",
        "named_modules",
        "state_dict",
    ]
)
"""Methods of models that leave the arguments of the call that made the model as they were."""


def is_pure_method_of_trainer(name: str) -> bool:
    """Does this method of a trainer leave its arguments as they were?"""
    return name in _METHODS_OF_TRAINERS


def is_pure_method_of_model(name: str) -> bool:
    """Does this method of a model leave the arguments of the call that made the model as they were?"""
    return name in _METHODS_OF_MODELS


def only_looks(place: Place, node: ast.AST) -> bool:
    """Does the surrounding node look at an object, and neither keep it nor hand it on?"""
    if isinstance(node, (ast.If, ast.While, ast.Assert, ast.IfExp)):
        return node.test is place.node
    return isinstance(node, (ast.Compare, ast.Expr, ast.FormattedValue, ast.UnaryOp))


def leaves_arguments_alone(function: ScopedExpression) -> bool:
    """Is it a callback of TRL or transformers, which is given a trainer, or TRL's ``get_peft_config(model_args)``?"""
    name = dotted_name(function) or ""
    is_callback = name.startswith(("transformers.", "trl.")) and name.endswith("Callback")
    return is_callback or name in ("trl.get_kbit_device_map", "trl.get_peft_config", "trl.get_quantization_config")


def changes_nothing(function: ast.expr) -> bool:
    owner, _, name = called_name(function).rpartition(".")
    if name in _LOGGING_METHODS:
        return owner.rpartition(".")[2].strip("_").lower() in ("log", "logger", "logging")
    return name in PURE_FUNCTIONS and owner in ("", "dataclasses", "pprint")


def looks_at_vars(call: Place) -> bool:
    """Does what stands around ``vars(args)`` look at it, read one key, or unpack it?"""
    assert call.parent is not None
    node = call.parent.node
    if isinstance(node, ast.keyword):
        return node.arg is None
    if isinstance(node, ast.Subscript):
        return node.value is call.node and isinstance(node.ctx, ast.Load)
    return changes_nothing(node.func) if isinstance(node, ast.Call) else only_looks(call, node)
