"""The trainers that a training script makes, and what it says of their arguments. It is read, and never run.

Python is read by ``ast``: names are followed to what they are assigned, as long as there is one answer. A config of the
command line of TRL (``trl sft --config x.yaml``) is read as what it is, the arguments of one trainer.
"""

from __future__ import annotations

import ast
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .catalogue.conditions import Argument, Kind, Lookup
from .errors import ScriptError, plain

OF_THE_TRAINER = frozenset(
    {"model", "ref_model", "teacher_model", "peft_config", "quantization_config", "tokenizer", "processing_class"}
    | {"train_dataset", "eval_dataset", "formatting_func", "data_collator", "callbacks", "reward_funcs"}
    | {"compute_loss_func", "compute_metrics", "optimizers"}
)
"""Arguments of trainers that no config has: where nothing but the config is unknown, they are known."""

POSITIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("BCO", "DPO", "KTO"), ("model", "ref_model")),
    **dict.fromkeys(("GRPO", "RLOO"), ("model", "reward_funcs", "args")),
    **dict.fromkeys(("CPO", "ORPO", "PRM", "Reward", "SFT"), ("model", "args", "data_collator")),
}
"""What trainers take by position, in the same order in every release."""

DISTINCTIVE_KEYS: Mapping[str, tuple[str, ...]] = {
    "SFT": ("assistant_only_loss", "completion_only_loss", "dataset_text_field", "eval_packing", "packing"),
    "DPO": ("f_divergence_type", "ld_alpha", "loss_weights", "rpo_alpha", "use_weighting"),
    "GRPO": ("importance_sampling_level", "multi_objective_aggregation", "scale_rewards", "top_entropy_quantile"),
    "KTO": ("desirable_weight", "undesirable_weight"),
    "RLOO": ("rloo_k", "normalize_advantages"),
    "Reward": ("center_rewards_coefficient",),
}
"""Keys of a config that only one of the trainers of the command line has."""

METHODS_RETURNING_MODEL = frozenset(
    ["bfloat16", "cpu", "cuda", "eval", "float", "half", "requires_grad_", "to", "train"]
)
"""Methods of a model that return it."""

LIBRARIES = ("datasets.", "peft.", "torch.", "transformers.")
BUILTINS = frozenset(["bool", "dict", "float", "int", "len", "list", "range", "set", "str", "tuple"])
_DEPTH = 40
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_UNSET = Argument(Kind.UNSET)
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef)
_COLLECTED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*_Definition, ast.ClassDef, ast.Lambda, *_COLLECTED)


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """A trainer that a script makes. ``name`` is TRL's, without ``Trainer``; ``called`` is what the script calls it."""

    name: str
    called: str
    line: int
    argument: Lookup


def read(path: Path, trainer: str | None = None) -> list[TrainerCall]:
    """The trainers of a script or of a config, in the order of the file. Raises ``ScriptError``.

    ``trainer`` is the one that a config is for, if its keys do not tell.
    """
    where = plain(str(path))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{where} cannot be read: {error.strerror or error}") from None
    if path.suffix.lower() in (".yaml", ".yml"):
        return [_config(source, where, trainer)]
    if path.suffix.lower() in (".ipynb", ".json", ".toml"):
        raise ScriptError(f"{where} is neither Python nor YAML: a notebook can be saved as a script (.py)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError as error:
        at = f", line {error.lineno}" if error.lineno else ""
        raise ScriptError(
            f"{where}{at} is not Python {sys.version_info[0]}.{sys.version_info[1]}: {error.msg}"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ScriptError(f"{where} is not Python: {error or type(error).__name__}") from None
    return list(_Script(tree).trainers())


@dataclass(frozen=True, slots=True, eq=False)
class _Binding:
    """One place where a name gets its value. Not ``unconditional``: it may not be reached, or more than once."""

    line: int
    unconditional: bool
    value: ast.expr | None = None
    why: str = ""
    dotted: str = ""
    definition: ast.AST | None = None


@dataclass(slots=True, eq=False)
class _Scope:
    parent: _Scope | None
    of_class: bool = False
    bindings: dict[str, list[_Binding]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], list[_Binding]] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _ScopedExpression:
    """An expression, with where it stands: names mean there what they mean."""

    node: ast.expr
    scope: _Scope
    line: int


class _Script:
    def __init__(self, tree: ast.Module) -> None:
        self._module = _Scope(None)
        self._calls: list[tuple[ast.Call, _Scope]] = []
        self._scope_of: dict[ast.AST, _Scope] = {}
        self._walk(tree)

    # Who is called what

    def _walk(self, tree: ast.Module) -> None:
        waiting: list[tuple[ast.AST, _Scope, bool]] = [(tree, self._module, True)]
        while waiting:
            node, scope, unconditional = waiting.pop()
            inner = list(self._enter(node, scope, unconditional))
            waiting.extend(reversed(inner))
        self._calls.sort(key=lambda each: (each[0].lineno, each[0].col_offset))

    def _enter(self, node: ast.AST, scope: _Scope, unconditional: bool) -> Iterator[tuple[ast.AST, _Scope, bool]]:
        """Note what ``node`` says, and give the nodes in it, with their scopes."""
        children: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, _SCOPES):
            yield from self._enter_scope(node, scope, unconditional, children)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, scope, unconditional)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            scope.elsewhere.update(node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                self._assign(target, node.value, scope, unconditional)
            children = [node.value, *(each for each in targets if isinstance(each, ast.Subscript))]
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, None, scope, unconditional)
            children = [node.value]
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            why = f"{node.id} is not assigned once and for all"
            self._bind(node.id, scope, _Binding(node.lineno, unconditional, why=why))
        elif isinstance(node, ast.Call):
            self._calls.append((node, scope))
        elif isinstance(node, (ast.ExceptHandler, ast.pattern)):
            for name in (getattr(node, "name", None), getattr(node, "rest", None)):
                if isinstance(name, str):
                    self._bind(name, scope, _Binding(node.lineno, unconditional, why=f"{name} is what was found"))
        branches = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)
        if isinstance(node, branches) and not _is_main(node):
            unconditional = False
        yield from ((child, scope, unconditional) for child in children)

    def _enter_scope(
        self, node: Any, scope: _Scope, unconditional: bool, children: list[ast.AST]
    ) -> Iterator[tuple[ast.AST, _Scope, bool]]:
        inner = _Scope(scope, of_class=isinstance(node, ast.ClassDef))
        self._scope_of[node] = inner
        name = getattr(node, "name", None)
        if name is not None:
            self._bind(name, scope, _Binding(node.lineno, unconditional, definition=node))
        arguments = getattr(node, "args", None)
        if arguments is not None:
            every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
            for each in filter(None, every):
                of = name or "a lambda"
                self._bind(each.arg, inner, _Binding(each.lineno, True, why=f"{each.arg} is a parameter of {of}"))
            yield from (
                (each, scope, unconditional) for each in [*arguments.defaults, *filter(None, arguments.kw_defaults)]
            )
            children = [each for each in children if each is not arguments]
        outer = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ()), *getattr(node, "keywords", ())]
        yield from ((each, scope, unconditional) for each in outer)
        yield from ((each, inner, True) for each in children if each not in outer)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: _Scope, unconditional: bool) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                dotted = f"{'.' * node.level}{node.module or ''}.{alias.name}"
            else:
                dotted = alias.name if alias.asname else alias.name.partition(".")[0]
            name = alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else dotted)
            self._bind(name, scope, _Binding(node.lineno, unconditional, dotted=dotted))

    def _bind(self, name: str, scope: _Scope, binding: _Binding) -> None:
        if name in scope.elsewhere:
            while scope.parent is not None:
                scope = scope.parent
            binding = _Binding(binding.line, False, binding.value, binding.why, binding.dotted, binding.definition)
        scope.bindings.setdefault(name, []).append(binding)

    def _assign(self, target: ast.expr, value: ast.expr | None, scope: _Scope, unconditional: bool) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            items: list[ast.expr | None] = [None] * len(target.elts)
            starred = any(isinstance(each, ast.Starred) for each in target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(items) and not starred:
                items = list(value.elts)
            why = f"a part of {_text(value)}" if value is not None else ""
            for each, item in zip(target.elts, items, strict=True):
                each = each.value if isinstance(each, ast.Starred) else each
                if item is None and isinstance(each, ast.Name):
                    self._bind(each.id, scope, _Binding(each.lineno, unconditional, why=f"{each.id} is {why}"))
                else:
                    self._assign(each, item, scope, unconditional)
        elif isinstance(target, ast.Name):
            why = "" if value is not None else f"{target.id} is changed in place"
            self._bind(target.id, scope, _Binding(target.lineno, unconditional, value, why))
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            why = "" if value is not None else f"{_text(target)} is changed in place"
            its = scope.attributes.setdefault((target.value.id, target.attr), [])
            its.append(_Binding(target.lineno, unconditional, value, why))

    def _find(self, name: str, scope: _Scope, line: int) -> tuple[_Binding, _Scope] | None:
        at: _Scope | None = scope
        while at is not None:
            if name in at.bindings and (at is scope or not at.of_class):
                return _choose(name, at.bindings[name], line if at is scope else None), at
            at = at.parent
        return None

    def _follow(self, at: _ScopedExpression) -> _ScopedExpression:
        """What a name is assigned in the end, and a model that is moved."""
        for _ in range(_DEPTH):
            node = at.node
            if isinstance(node, ast.Name):
                found = self._find(node.id, at.scope, at.line)
                if found is None or found[0].value is None:
                    return at
                at = _ScopedExpression(found[0].value, found[1], found[0].line)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in METHODS_RETURNING_MODEL
            ):
                at = _ScopedExpression(node.func.value, at.scope, at.line)
            else:
                return at
        return at

    def _dotted(self, at: _ScopedExpression) -> str | None:
        """``a.b.c`` with the name that ``a`` was imported by; None if ``a`` is no module, class or function."""
        steps: list[str] = []
        node = at.node
        while isinstance(node, ast.Attribute):
            steps.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        found = self._find(node.id, at.scope, at.line)
        if found is None:
            root = node.id
        elif found[0].dotted:
            root = found[0].dotted
        elif found[0].definition is not None:
            root = node.id
        elif isinstance(found[0].value, (ast.Name, ast.Attribute)) and found[0].value is not node:
            inner = self._dotted_of_alias(_ScopedExpression(found[0].value, found[1], found[0].line))
            if inner is None:
                return None
            root = inner
        else:
            return None
        return ".".join([root, *reversed(steps)])

    def _dotted_of_alias(self, at: _ScopedExpression) -> str | None:
        """``T = trl.DPOTrainer``: one step, and no more, so that it ends."""
        node, steps = at.node, []
        while isinstance(node, ast.Attribute):
            steps.append(node.attr)
            node = node.value
        found = self._find(node.id, at.scope, at.line) if isinstance(node, ast.Name) else None
        return ".".join([found[0].dotted, *reversed(steps)]) if found is not None and found[0].dotted else None

    def _classes(self, at: _ScopedExpression) -> Iterator[tuple[str, ast.ClassDef | None]]:
        """The class that ``at`` names, then those it is derived from: their dotted names, and those of the script."""
        seen: set[ast.AST] = set()
        waiting = [at]
        while waiting:
            at = waiting.pop(0)
            node = at.node
            while isinstance(node, ast.Subscript):
                node = node.value
            dotted = self._dotted(_ScopedExpression(node, at.scope, at.line))
            found = self._find(node.id, at.scope, at.line) if isinstance(node, ast.Name) else None
            definition = found[0].definition if found is not None else None
            if dotted is None or (definition is not None and definition in seen):
                continue
            if isinstance(definition, ast.ClassDef) and found is not None:
                seen.add(definition)
                yield dotted, definition
                waiting.extend(_ScopedExpression(base, found[1], definition.lineno) for base in definition.bases)
            elif definition is None:
                yield dotted, None

    # What an argument is

    def value(self, at: _ScopedExpression, depth: int = 0) -> Argument:
        """What ``at`` is, as far as the text says."""
        node = at.node
        line = node.lineno
        if depth > _DEPTH:
            return Argument(Kind.UNKNOWN, line=line, why="it is nested too deeply")
        if isinstance(node, ast.Constant):
            return Argument(Kind.LITERAL, node.value, line)
        if isinstance(node, (ast.UnaryOp, ast.BinOp)):
            return self._computed(node, at, depth)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return self._collected([_ScopedExpression(each, at.scope, at.line) for each in node.elts], line, depth)
        if isinstance(node, ast.Dict):
            return Argument(Kind.OBJECT, line=line, by=("dict",))
        if isinstance(node, ast.JoinedStr):
            return Argument(Kind.OBJECT, line=line, by=("str",))
        if isinstance(node, (ast.Lambda, *_COLLECTED)):
            return Argument(Kind.OBJECT, line=line, whole=False)
        if isinstance(node, ast.Name):
            return self._named(node, at, depth)
        if isinstance(node, ast.Call):
            return self._called(node, at, depth)
        dotted = self._dotted(at) if isinstance(node, ast.Attribute) else None
        if dotted is not None and dotted.startswith("torch."):
            return Argument(Kind.LITERAL, dotted.rpartition(".")[2], line)
        if isinstance(node, ast.Subscript):
            inner = self.value(_ScopedExpression(node.value, at.scope, at.line), depth + 1)
            if any(each.startswith("datasets.") for each in inner.by):
                return Argument(Kind.OBJECT, line=line, by=inner.by)
        return Argument(Kind.UNKNOWN, line=line, why=_text(node))

    def _computed(self, node: ast.UnaryOp | ast.BinOp, at: _ScopedExpression, depth: int) -> Argument:
        sides = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        values = [self.value(_ScopedExpression(each, at.scope, at.line), depth + 1) for each in sides]
        numbers = [each.value for each in values if each.kind is Kind.LITERAL and isinstance(each.value, (int, float))]
        unknown = Argument(Kind.UNKNOWN, line=node.lineno, why=_text(node))
        if len(numbers) < len(values):
            return unknown
        try:
            if isinstance(node, ast.BinOp):
                compute = _ARITHMETIC.get(type(node.op))
                return Argument(Kind.LITERAL, compute(*numbers), node.lineno) if compute is not None else unknown
            if isinstance(node.op, ast.Not):
                return Argument(Kind.LITERAL, not numbers[0], node.lineno)
            if isinstance(node.op, ast.USub):
                return Argument(Kind.LITERAL, -numbers[0], node.lineno)
        except (ArithmeticError, ValueError):
            return unknown
        return unknown

    def _collected(self, items: list[_ScopedExpression], line: int, depth: int) -> Argument:
        values = [self.value(each, depth + 1) for each in items[:_DEPTH]]
        if len(items) <= _DEPTH and all(each.kind is Kind.LITERAL for each in values):
            return Argument(Kind.LITERAL, [each.value for each in values], line)
        known = all(each.kind is not Kind.UNKNOWN and each.whole for each in values) and len(items) <= _DEPTH
        return Argument(Kind.OBJECT, line=line, by=tuple(name for each in values for name in each.by), whole=known)

    def _named(self, node: ast.Name, at: _ScopedExpression, depth: int) -> Argument:
        found = self._find(node.id, at.scope, at.line)
        if found is None:
            return Argument(Kind.UNKNOWN, line=node.lineno, why=f"{node.id} is not assigned in this file")
        binding, scope = found
        if binding.value is not None:
            return self.value(_ScopedExpression(binding.value, scope, binding.line), depth + 1)
        if binding.definition is not None:
            return Argument(Kind.OBJECT, line=node.lineno, by=(node.id,))
        if binding.dotted:
            return Argument(Kind.UNKNOWN, line=node.lineno, why=f"{node.id} is imported ({binding.dotted})")
        return Argument(Kind.UNKNOWN, line=binding.line, why=binding.why)

    def _called(self, node: ast.Call, at: _ScopedExpression, depth: int) -> Argument:
        line = node.lineno
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS_RETURNING_MODEL:
            return self.value(_ScopedExpression(node.func.value, at.scope, at.line), depth + 1)
        classes = list(self._classes(_ScopedExpression(node.func, at.scope, at.line)))
        names = tuple(name for name, _ in classes)
        dotted = self._dotted(_ScopedExpression(node.func, at.scope, at.line))
        makes = any(part[:1].isupper() for name in names for part in name.split("."))
        if names and (makes or names[0].startswith(LIBRARIES) or (names[0] in BUILTINS)):
            return Argument(Kind.OBJECT, line=line, by=names)
        if dotted is None and isinstance(node.func, ast.Attribute):
            owner = self.value(_ScopedExpression(node.func.value, at.scope, at.line), depth + 1)
            if any(each.startswith("datasets.") for each in owner.by):
                return Argument(Kind.OBJECT, line=line, by=owner.by)
        return Argument(Kind.UNKNOWN, line=line, why=f"what {_text(node.func)}() returns is not in the text")

    # Trainers

    def trainers(self) -> Iterator[TrainerCall]:
        """The trainers of TRL, and what is derived from them, in the order in which they are made."""
        added = self._added_callbacks()
        for call, scope in self._calls:
            at = _ScopedExpression(call.func, scope, call.lineno)
            classes = list(self._classes(at))
            names = [name for name, _ in classes if _is_trainer(name)]
            if names and not _is_super(call.func):
                name = names[0].rpartition(".")[2].removesuffix("Trainer")
                reader = _Trainer(self, call, scope, name, [each for _, each in classes if each is not None])
                reader.callbacks = added.get(call, [])
                yield TrainerCall(name, classes[0][0].rpartition(".")[2], call.lineno, reader.argument)

    def _added_callbacks(self) -> dict[ast.AST, list[_ScopedExpression]]:
        """``trainer.add_callback(x)``, by the call that makes the trainer."""
        added: dict[ast.AST, list[_ScopedExpression]] = {}
        for call, scope in self._calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_callback" and call.args:
                trainer = self._follow(_ScopedExpression(call.func.value, scope, call.lineno)).node
                added.setdefault(trainer, []).append(_ScopedExpression(call.args[0], scope, call.lineno))
        return added


class _Trainer:
    """The arguments of one call of a trainer: its own, and those of its config."""

    def __init__(self, script: _Script, call: ast.Call, scope: _Scope, name: str, classes: list[ast.ClassDef]) -> None:
        self._script, self._scope, self._line = script, scope, call.lineno
        self.callbacks: list[_ScopedExpression] = []
        self._own, self._open = self._given(call, scope, call.lineno)
        order = POSITIONS.get(name, ("model",))
        self._config: _ScopedExpression | None = self._own.get("args")
        for number, value in enumerate(call.args):
            at = _ScopedExpression(value, scope, call.lineno)
            if isinstance(value, ast.Starred) or (number >= len(order) and not self._makes_config(at)):
                self._open = self._open or Argument(
                    Kind.UNKNOWN, line=value.lineno, why=f"{_text(value)} is given to {name}Trainer by position"
                )
            elif self._makes_config(at) or order[number] == "args":
                self._config = self._config or at
            else:
                self._own.setdefault(order[number], at)
        for each in classes:
            if any(isinstance(part, _Definition) and part.name == "__init__" for part in each.body):
                why = f"{each.name}.__init__ may set it"
                self._open = self._open or Argument(Kind.UNKNOWN, line=each.lineno, why=why)
        self._read_config()

    def _read_config(self) -> None:
        """The config: the keywords of its call, what is set on its variable, the defaults of a class of the script."""
        self._arguments: dict[str, _ScopedExpression] = {}
        self._closed: Argument | None = None
        if self._config is None:
            return
        made = self._script._follow(self._config)
        if isinstance(made.node, ast.Constant) and made.node.value is None:
            return
        if self._makes_config(made) and isinstance(made.node, ast.Call):
            for _, definition in self._script._classes(_ScopedExpression(made.node.func, made.scope, made.line)):
                if definition is not None:
                    self._read_defaults(definition)
            given, self._closed = self._given(made.node, made.scope, made.line)
            self._arguments.update(given)
        else:
            found = self._script.value(self._config)
            why = found.why or _text(made.node)
            self._closed = Argument(Kind.UNKNOWN, line=found.line or self._line, why=why)

    def _read_defaults(self, definition: ast.ClassDef) -> None:
        """``class MyConfig(DPOConfig): padding_free: bool = True``; and its methods may set anything."""
        scope = self._script._scope_of[definition]
        for part in definition.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.value is not None:
                self._arguments.setdefault(part.target.id, _ScopedExpression(part.value, scope, part.lineno))

    def _makes_config(self, at: _ScopedExpression) -> bool:
        node = self._script._follow(at).node
        if not isinstance(node, ast.Call):
            return False
        made = self._script._follow(at)
        names = [name for name, _ in self._script._classes(_ScopedExpression(node.func, made.scope, made.line))]
        return any(name.endswith(("Config", "TrainingArguments")) and "." not in name[-7:] for name in names)

    def _given(self, call: ast.Call, scope: _Scope, line: int) -> tuple[dict[str, _ScopedExpression], Argument | None]:
        """The keywords of a call, with those of ``**{...}``; and what else may be given, if anything."""
        given: dict[str, _ScopedExpression] = {}
        unknown = None
        for each in call.keywords:
            at = _ScopedExpression(each.value, scope, line)
            if each.arg is not None:
                given[each.arg] = at
                continue
            made = self._script._follow(at)
            keys = made.node.keys if isinstance(made.node, ast.Dict) else [None]
            if isinstance(made.node, ast.Call) and _text(made.node.func) == "dict" and not made.node.args:
                inner, unknown = self._given(made.node, made.scope, made.line)
                given.update(inner)
            elif isinstance(made.node, ast.Dict) and all(isinstance(key, ast.Constant) for key in keys):
                for key, value in zip(made.node.keys, made.node.values, strict=True):
                    given[str(getattr(key, "value", ""))] = _ScopedExpression(value, made.scope, made.line)
            else:
                unknown = Argument(Kind.UNKNOWN, line=each.value.lineno, why=f"**{_text(each.value)} may set it")
        return given, unknown

    def argument(self, name: str) -> Argument:
        """What the script says of an argument; ``model.adapter_name`` is one of the call that makes ``model``."""
        head, _, part = name.partition(".")
        at = self._own.get(head)
        found = self._script.value(at) if at is not None else None
        if found is None or (found.kind is Kind.LITERAL and found.value is None):
            in_config = self._of_config(head)
            at, found = in_config if in_config[1].kind is not Kind.UNSET or found is None else (at, found)
        if head == "callbacks" and self.callbacks:
            values = [found, *(self._script.value(each) for each in self.callbacks)]
            by = tuple(each for value in values for each in value.by)
            whole = all(value.whole and value.kind is not Kind.UNKNOWN for value in values)
            return Argument(Kind.OBJECT, line=self.callbacks[0].line, by=by, whole=whole)
        return self._part(found, at, part) if part else found

    def _of_config(self, name: str) -> tuple[_ScopedExpression | None, Argument]:
        later = self._set_later(name)
        if later is not None:
            return later
        if name in self._arguments:
            at = self._arguments[name]
            return at, self._script.value(at)
        if name in OF_THE_TRAINER:
            return None, self._open or _UNSET
        return None, self._closed or self._open or _UNSET

    def _set_later(self, name: str) -> tuple[_ScopedExpression | None, Argument] | None:
        """``training_args.name = value``, before the trainer is made."""
        if self._config is None or not isinstance(self._config.node, ast.Name):
            return None
        variable = self._config.node.id
        found = self._script._find(variable, self._scope, self._line)
        places = [self._scope] if found is None or found[1] is self._scope else [self._scope, found[1]]
        made = found[0].line if found is not None else 0
        sets = [
            (each, scope)
            for scope in places
            for each in scope.attributes.get((variable, name), ())
            if scope is not self._scope or made <= each.line < self._line
        ]
        if not sets:
            return None
        binding, scope = max(sets, key=lambda each: each[0].line)
        if binding.value is None or not binding.unconditional or (len(sets) > 1 and scope is not self._scope):
            why = binding.why or f"{variable}.{name} is set in a branch, or more than once"
            return None, Argument(Kind.UNKNOWN, line=binding.line, why=why)
        at = _ScopedExpression(binding.value, scope, binding.line)
        return at, self._script.value(at)

    def _part(self, whole: Argument, at: _ScopedExpression | None, name: str) -> Argument:
        if whole.kind is Kind.UNKNOWN:
            return whole
        if at is None or whole.kind is not Kind.OBJECT:
            return _UNSET
        made = self._script._follow(at)
        if isinstance(made.node, ast.Dict):
            made = _ScopedExpression(ast.Call(made.node, [], [ast.keyword(None, made.node)]), made.scope, made.line)
        if not isinstance(made.node, ast.Call):
            return Argument(Kind.UNKNOWN, line=whole.line, why=_text(made.node))
        given, unknown = self._given(made.node, made.scope, made.line)
        return self._script.value(given[name]) if name in given else unknown or _UNSET


def _choose(name: str, bindings: list[_Binding], line: int | None) -> _Binding:
    """The binding that holds at ``line``, if the text says which; None: in a function that is called who knows when."""
    if len(bindings) == 1:
        return bindings[0]
    imports = [each for each in bindings if each.dotted]
    if len(imports) == len(bindings):  # try: from trl import ... except ImportError: from trl.experimental import ...
        return next((each for each in imports if each.dotted.split(".")[0] == "trl"), imports[-1])
    before = [each for each in bindings if line is not None and each.line < line]
    if before and all(each.unconditional for each in before):
        return before[-1]
    lines = ", ".join(str(each.line) for each in bindings[:5])
    return _Binding(bindings[-1].line, False, why=f"{name} is assigned more than once (lines {lines})")


def _is_trainer(dotted: str) -> bool:
    package, _, name = dotted.rpartition(".")
    return package.split(".")[0] == "trl" and name.endswith("Trainer") and name != "Trainer"


def _is_super(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "__init__"


def _is_main(node: ast.AST) -> bool:
    """``if __name__ == "__main__":``"""
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _text(node: ast.AST | None) -> str:
    """A piece of the script, short, on one line."""
    try:
        text = " ".join(ast.unparse(node).split()) if node is not None else ""
    except RecursionError:
        text = "a long expression"
    return plain(text if len(text) <= 60 else f"{text[:57]}...")


# A config of the command line


def _config(source: bytes, where: str, trainer: str | None) -> TrainerCall:
    lines, values = _yaml(source, where)
    name = trainer or _told_by_keys(values, where)
    adapter = values.get("use_peft") is True or str(values.get("use_peft")).lower() == "true"
    evaluates = "eval_strategy" in values and values["eval_strategy"] not in ("no", False, None)

    def argument(wanted: str) -> Argument:
        head, _, part = wanted.partition(".")
        line = lines.get(head)
        if head in ("model", "ref_model", "processing_class", "tokenizer"):
            why = f"trl {name.lower()} makes it, and its script is not in this file"
            return Argument(Kind.UNKNOWN, line=lines.get("model_name_or_path"), why=why)
        if head == "peft_config" and adapter:
            return Argument(Kind.OBJECT, line=lines["use_peft"], by=("peft.LoraConfig",)) if not part else _UNSET
        if head == "eval_dataset" and evaluates:
            return Argument(Kind.OBJECT, line=lines["eval_strategy"], by=("datasets.load_dataset",))
        if head in OF_THE_TRAINER or head not in values:
            return _UNSET
        value = values[head]
        if not part:
            return Argument(Kind.LITERAL, value, line)
        inner = isinstance(value, dict) and part in value
        return Argument(Kind.LITERAL, value[part], line) if inner else _UNSET

    return TrainerCall(name, f"trl {name.lower()}", 1, argument)


def _yaml(source: bytes, where: str) -> tuple[dict[str, int], dict[str, Any]]:
    try:
        root = yaml.compose(source, Loader=yaml.SafeLoader)
        values = yaml.safe_load(source)
    except yaml.MarkedYAMLError as error:
        at = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ScriptError(f"{where}{at} is not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ScriptError(f"{where} is not YAML: {plain(str(error).splitlines()[0])}") from None
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise ScriptError(f"{where}: expected a config of TRL's command line, a mapping such as 'packing: true'")
    lines = {key.value: key.start_mark.line + 1 for key, _ in root.value if isinstance(key.value, str)}
    return lines, {str(key): value for key, value in values.items()}


def _told_by_keys(values: Mapping[str, Any], where: str) -> str:
    told = {name: [key for key in keys if key in values] for name, keys in DISTINCTIVE_KEYS.items()}
    names = [name for name, keys in told.items() if keys]
    if len(names) == 1:
        return names[0]
    if not names:
        raise ScriptError(f"{where}: its keys do not tell the trainer; name it, as in --trainer DPO")
    said = "; ".join(f"{', '.join(told[name])} of {name}" for name in names)
    raise ScriptError(
        f"{where} has keys of several trainers ({said}); name the one it is for, as in --trainer {names[0]}"
    )
