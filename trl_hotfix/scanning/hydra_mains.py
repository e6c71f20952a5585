"""The config that ``@hydra.main`` gives a function, and what ``OmegaConf.load`` and ``OmegaConf.merge`` return."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..catalogue.conditions import Kind
from .argv import change_of_argv
from .click_groups import check_calls
from .names import dotted_name, follow
from .origins import Evaluate
from .overrides import RefusedError, of_hydra, of_omegaconf
from .parser_texts import UnclearError
from .scopes import FUNCTIONS, Scope, ScopedExpression, source_text
from .settings_files import Keys, Settings, load
from .settings_uses import Change

_OF_HYDRA = frozenset(["job", "job_logging", "hydra_logging", "output_subdir", "run", "verbose"])
"""Keys of Hydra's own part of a config that leave the rest of it as it is."""


@dataclass(frozen=True, eq=False)
class Given:
    """A config. ``unclear``: why the text does not show it. ``refused``: why the script ends.

    ``reads_words``: the command line may change it. ``changes`` has what is known of each name that holds a part of it.
    """

    settings: Settings | None
    unclear: str = ""
    refused: str = ""
    reads_words: bool = True
    changes: dict[tuple[str, int, Keys], list[Change]] = field(default_factory=dict)


def given_by_hydra(definition: ast.AST, module: Scope, evaluate: Evaluate) -> Given | None:
    """Return what a function of ``@hydra.main`` is called with; None for other functions."""
    if not isinstance(definition, FUNCTIONS):
        return None
    decorators = [ScopedExpression(node, module, definition.lineno) for node in definition.decorator_list]
    calls = [one for one in decorators if isinstance(one.node, ast.Call) and _name(one) == "hydra.main"]
    if not calls:
        return None
    known, key = module.namespaces, (Given, definition)
    if key not in known:
        try:
            known[key] = Given(_of_main(calls[0], definition, module, evaluate))
        except UnclearError as error:
            known[key] = Given(None, str(error))
        except RefusedError as error:
            known[key] = Given(None, refused=str(error))
    found: Given = known[key]
    return found


def given_by_call(made: ScopedExpression, evaluate: Evaluate) -> Given | None:
    """Return what ``OmegaConf.load(file)`` returns, or ``OmegaConf.merge`` of that and ``OmegaConf.from_cli()``."""
    known, key = made.scope.module.namespaces, (Given, made.node)
    if key not in known:
        try:
            known[key] = _of_call(made, evaluate)
        except UnclearError as error:
            known[key] = Given(None, str(error), reads_words=_name(made) == "omegaconf.OmegaConf.merge")
    found: Given | None = known[key]
    return found


def _name(call: ScopedExpression) -> str:
    node = call.node
    return (dotted_name(call.with_node(node.func)) or "") if isinstance(node, ast.Call) else ""


def _of_main(decorator: ScopedExpression, definition: Any, module: Scope, evaluate: Evaluate) -> Settings:
    if len(definition.decorator_list) != 1 or len(definition.args.args) != 1 or module.file is None:
        raise UnclearError(f"{definition.name} has other decorators or parameters")
    check_calls(definition, module)
    store = next((line for name, line in _imports(module) if name.startswith("hydra.core")), None)
    if store is not None:
        raise UnclearError(f"a part of the config may be in the ConfigStore (line {store})")
    line = change_of_argv(module)
    if line is not None:
        raise UnclearError(f"sys.argv may be changed at line {line}")
    options = _options(decorator, evaluate)
    folder = module.file.parent / options["config_path"]
    name = options["config_name"].removesuffix(".yaml")
    settings = _without_hydra(_loaded(folder / f"{name}.yaml", module.file, decorator), name)
    if module.words is None:
        return settings._replace(untold=True)
    return of_hydra(settings, module.words, folder)


def uses_settings(module: Scope) -> bool:
    """Does a script import OmegaConf or Hydra?"""
    return any(name.partition(".")[0] in ("hydra", "omegaconf") for name, _ in _imports(module))


def _imports(module: Scope) -> list[tuple[str, int]]:
    """Return the dotted names that a script imports, and their lines."""
    known = module.namespaces
    if _imports not in known:
        scopes = (module, *module.inner.values())
        module.budget.spend(len(scopes))
        bindings = [binding for scope in scopes for of_name in scope.bindings.values() for binding in of_name]
        known[_imports] = [(binding.dotted, binding.line) for binding in bindings if binding.dotted]
    found: list[tuple[str, int]] = known[_imports]
    return found


def _may_change_folder(module: Scope) -> bool:
    """May a script change its working directory? A use of ``chdir`` is one, whatever it belongs to."""
    names = {part for name, _ in _imports(module) for part in name.split(".")}
    scopes = (module, *module.inner.values())
    uses = [use for scope in scopes for of_name in scope.uses.values() for use in of_name]
    attributes = {getattr(use.parent.node, "attr", "") for use in module.budget.counted(uses) if use.parent is not None}
    return bool({"chdir", "fchdir", "hydra"} & (names | attributes))


def _options(decorator: ScopedExpression, evaluate: Evaluate) -> dict[str, str]:
    """Return ``config_path`` and ``config_name``."""
    call = decorator.node
    assert isinstance(call, ast.Call)
    given = {str(keyword.arg): decorator.with_node(keyword.value) for keyword in call.keywords}
    if call.args or not given.keys() <= {"config_name", "config_path", "version_base"}:
        raise UnclearError(f"{source_text(call)} is not read (line {call.lineno})")
    found = {}
    for name in ("config_path", "config_name"):
        value = evaluate(given[name]).value if name in given else None
        if not isinstance(value, str) or not value or ":" in value or "\0" in value:
            raise UnclearError(f"the text does not tell {name} of hydra.main (line {call.lineno})")
        found[name] = value
    if "/" in found["config_name"] or found["config_name"].endswith(".yml"):
        raise UnclearError(f"config_name={found['config_name']!r} is not read (line {call.lineno})")
    return found


def _loaded(path: Path, script: Path, at: ScopedExpression) -> Settings:
    settings = load(path, script)
    at.budget.spend(len(settings.places))
    return settings


def _without_hydra(settings: Settings, name: str) -> Settings:
    """Take out what is for Hydra itself. Raises ``UnclearError`` if that brings more values in."""
    values = dict(settings.values)
    defaults, own = values.pop("defaults", None), values.pop("hydra", None)
    if defaults not in (None, [], ["_self_"]):
        raise UnclearError(f"{settings.file} has a list of defaults, {settings.place(('defaults',))}")
    if own is not None and not (isinstance(own, dict) and own.keys() <= _OF_HYDRA):
        raise UnclearError(f"{settings.file} sets up Hydra itself, {settings.place(('hydra',))}")
    return settings._replace(values=values)


def _of_call(made: ScopedExpression, evaluate: Evaluate) -> Given | None:
    call, name, module = made.node, _name(made), made.scope.module
    if not isinstance(call, ast.Call) or name not in ("omegaconf.OmegaConf.load", "omegaconf.OmegaConf.merge"):
        return None
    if name == "omegaconf.OmegaConf.load":
        if len(call.args) != 1 or call.keywords or module.file is None:
            raise UnclearError(f"{source_text(call)} is not read (line {call.lineno})")
        return Given(_loaded(_path(made.with_node(call.args[0]), evaluate), module.file, made), reads_words=False)
    parts = [follow(made.with_node(part)) for part in call.args]
    if call.keywords or [_name(part) for part in parts] != ["omegaconf.OmegaConf.load", "omegaconf.OmegaConf.from_cli"]:
        raise UnclearError(f"{source_text(call)} is not read (line {call.lineno})")
    if not _is_without_words(parts[1]) or change_of_argv(module) is not None:
        raise UnclearError("the words of OmegaConf.from_cli() may be others")
    base = given_by_call(parts[0], evaluate)
    if base is None or base.settings is None:
        raise UnclearError(base.unclear if base is not None else "its file is not read")
    words = module.words
    return Given(base.settings._replace(untold=True) if words is None else of_omegaconf(base.settings, words))


def _is_without_words(call: ScopedExpression) -> bool:
    return isinstance(call.node, ast.Call) and not call.node.args and not call.node.keywords


def _path(path: ScopedExpression, evaluate: Evaluate) -> Path:
    """Return the file that ``OmegaConf.load`` reads."""
    script = path.scope.module.file
    assert script is not None
    beside = _beside(follow(path), evaluate)
    if beside is not None:
        return script.parent / beside
    value = evaluate(path)
    if value.kind is not Kind.LITERAL or not isinstance(value.value, str) or "\0" in value.value:
        raise UnclearError(f"the text does not have the file {source_text(path.node)}")
    if _may_change_folder(path.scope.module):
        raise UnclearError(f"Hydra or chdir may change the folder of {value.value!r}")
    files = [folder / value.value for folder in (Path.cwd(), script.parent)]
    # `pathlib` raises for a name that is too long.
    found = {file for file in files if os.path.isfile(file)}
    if len(found) != 1:
        where = "is not here" if not found else "is beside the script, and here too"
        raise UnclearError(f"{value.value!r} {where}")
    return found.pop()


def _beside(path: ScopedExpression, evaluate: Evaluate) -> str | None:
    """Return the name in ``Path(__file__).parent / "x.yaml"``, or in ``os.path.join`` with the folder of the script."""
    node = path.node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        owner, name = node.left, node.right
    elif isinstance(node, ast.Call) and _name(path) == "os.path.join" and len(node.args) == 2 and not node.keywords:
        owner, name = node.args
    else:
        return None
    if source_text(follow(path.with_node(owner)).node) not in _FOLDERS:
        return None
    value = evaluate(path.with_node(name))
    is_name = value.kind is Kind.LITERAL and isinstance(value.value, str) and "\0" not in value.value
    return value.value if is_name else None


_FOLDERS = frozenset(
    [
        "Path(__file__).parent",
        "Path(__file__).resolve().parent",
        "os.path.dirname(__file__)",
        "os.path.dirname(os.path.abspath(__file__))",
        "pathlib.Path(__file__).parent",
    ]
)
