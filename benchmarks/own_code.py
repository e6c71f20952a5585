"""Tell our code from TRL's while a trainer runs: how long ours takes, what it allocates, how many modules it visits.

The functions of the patches and of ``trl_hotfix.authoring`` are compiled with a decorator each, nested functions too:
a wrapper may leave a view or a hook that runs later, within TRL's code. Our code ends where it calls TRL, a model or a
tokenizer, which it stands in front of. A profiler would do the same, and make a call of Python many times as slow.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

OURS = ("trl_hotfix.authoring.", "trl_hotfix.patches.")
NOT_TIMED = "trl_hotfix.authoring.verdicts"
"""What proofs and self-tests judge by. No wrapper calls it."""
MARK = "__ours__"
"""The name of the decorator in the code of our modules."""

ONCE, FIRST, STEPS, EVALUATION = "once", "first", "steps", "evaluation"
"""The phases of a run: outside of the training, its first micro-batch, the others, and an evaluation."""

WORK_OF_TRL = {
    "torch.nn:Module": ("__call__", "state_dict"),
    "accelerate:Accelerator": ("backward",),
    "transformers:PreTrainedTokenizerBase": ("__call__", "apply_chat_template"),
    "transformers:PreTrainedModel": ("from_pretrained",),
    "transformers:AutoModelForCausalLM": ("from_pretrained",),
    "transformers:GenerationMixin": ("generate",),
    "transformers:DataCollatorForLanguageModeling": ("torch_call",),
}
"""What our code calls in TRL's place, beside TRL and the ``Trainer``: it would run without the patch too."""

SYNCHRONISING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
"""The operations for whose result the processor waits until the GPU has done all its work."""


@dataclass
class Span:
    """One stay in our code: from its entry until it returns, without what it calls of TRL."""

    name: str
    phase: str = ONCE
    micro_batch: int = 0
    is_target: bool = False
    seconds: float = 0.0
    bytes: int = 0
    largest: int = 0
    """The elements of the largest tensor that it makes."""
    operations: int = 0
    synchronisations: int = 0
    modules: int = 0
    """The modules of a model that it visits."""


class Clock:
    """What runs, ours or TRL's, and the spans of ours. Not for several threads."""

    def __init__(self) -> None:
        self.is_ours = False
        self.phase, self.micro_batch, self.trainings = ONCE, 0, 0
        self.ended: set[int] = set()
        """The trainings that have come to their end."""
        self.spans: list[Span] = []
        self._open: list[Span] = []
        self._since = 0.0

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    @property
    def span(self) -> Span:
        """The span that is open."""
        return self._open[-1]

    def exclude(self, seconds: float) -> None:
        """Leave out what the measuring has taken."""
        self.span.seconds -= seconds

    def ours(self, function: Callable[..., Any], target: str | None = None) -> Callable[..., Any]:
        """Return ``function``, whose time is ours. ``target``: it stands on this function of TRL."""
        name = target or function.__qualname__

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.is_ours:
                return function(*args, **kwargs)
            self._open.append(Span(name, self.phase, self.micro_batch, target is not None))
            self.is_ours, self._since = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                span = self._open.pop()
                span.seconds += time.thread_time() - self._since
                self.is_ours = False
                self.spans.append(span)

        return timed

    def theirs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, whose time is not ours where our code calls it."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.is_ours:
                return function(*args, **kwargs)
            span = self._open[-1]
            span.seconds += time.thread_time() - self._since
            self.is_ours = False
            try:
                return function(*args, **kwargs)
            finally:
                self.is_ours, self._since = True, time.thread_time()

        return timed


CLOCK = Clock()


class _Marking(ast.NodeTransformer):
    """Decorates each function, nested ones and lambdas too. A generator runs where it is consumed, so it has none."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if not any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node)):
            node.decorator_list.append(ast.Name(MARK, ast.Load()))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        return ast.Call(ast.Name(MARK, ast.Load()), [node], [])


def marked(source: str, file: str) -> CodeType:
    """Return the code of a module of ours whose functions are timed."""
    tree = ast.fix_missing_locations(_Marking().visit(ast.parse(source)))
    return compile(tree, file, "exec", dont_inherit=True)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # The compiled file that lies beside the source has no marks, and must not get any.
        return marked(self.get_data(self.path).decode(), self.path)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, MARK, CLOCK.ours)
        super().exec_module(module)


class _Finder:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(OURS) or name == NOT_TIMED or path is None:
            return None
        for folder in path:
            base = Path(folder, name.rpartition(".")[2])
            for file in (base / "__init__.py", base.with_suffix(".py")):
                if file.is_file():
                    loader = _Loader(name, str(file))
                    return importlib.util.spec_from_file_location(name, file, loader=loader)
        return None


def install() -> None:
    """Time our modules from now on. None of them may have been imported."""
    imported = [name for name in sys.modules if name.startswith(OURS)]
    if imported:
        raise RuntimeError(f"{', '.join(imported)} was imported too early to be timed")
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    from trl_hotfix.call import Call, Changed, Wrapped
    from trl_hotfix.patching import wrappers

    layered = wrappers._layered

    def timed_layer(raw: FunctionType, layer: Any, **how: Any) -> Any:
        # What a constructor is given is noted once for all patches, and is the cost of none of them.
        if layer.observe:
            return layered(raw, layer, **how)
        return CLOCK.ours(layered(raw, layer, **how), raw.__qualname__)

    wrappers._layered = timed_layer  # type: ignore[assignment]
    for form in (Call, Changed, Wrapped):
        form.__call__ = CLOCK.theirs(form.__call__)  # type: ignore[method-assign]


def _replaced(owner: Any, name: str, replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    raw = inspect.getattr_static(owner, name)
    function = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
    setattr(owner, name, type(raw)(replace(function)) if function is not raw else replace(function))


def leave_out_trl(modules: Sequence[ModuleType]) -> None:
    """Do not count what our code calls of TRL's own functions in these modules. The patches must be on already."""
    for module in modules:
        owners = {
            id(base): base for value in vars(module).values() if isinstance(value, type) for base in value.__mro__
        }
        for owner in (module, *owners.values()):
            for name, function in list(vars(owner).items()):
                # A proof asks a constructor for the names of its variables, which are those of its code.
                is_of_trl = isinstance(function, FunctionType) and function.__module__.startswith("trl.")
                if is_of_trl and not name.startswith("__"):
                    _replaced(owner, name, CLOCK.theirs)


def leave_out_libraries() -> None:
    """Do not count what our code calls in TRL's place of torch, accelerate and transformers."""
    for path, names in WORK_OF_TRL.items():
        module, _, owner = path.partition(":")
        for name in names:
            _replaced(getattr(importlib.import_module(module), owner), name, CLOCK.theirs)
    from transformers import Trainer

    for name, function in list(vars(Trainer).items()):
        if isinstance(function, FunctionType):
            _replaced(Trainer, name, CLOCK.theirs)


def follow_the_training() -> None:
    """Keep ``phase`` and ``micro_batch`` of the clock."""
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

    def set_phase(name: str, phase: str) -> None:
        def replace(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                CLOCK.phase = phase
                CLOCK.micro_batch += phase != ONCE
                CLOCK.trainings += phase == FIRST
                if name == "on_train_end":
                    CLOCK.ended.add(CLOCK.trainings)
                return function(*args, **kwargs)

            return call

        _replaced(CallbackHandler, name, replace)

    # A training that ends by an error has no other end than the next trainer.
    set_phase("__init__", ONCE)
    set_phase("on_train_begin", FIRST)
    set_phase("on_substep_end", STEPS)
    set_phase("on_step_end", STEPS)
    set_phase("on_train_end", ONCE)

    def evaluating(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            before, CLOCK.phase = CLOCK.phase, EVALUATION
            try:
                return function(*args, **kwargs)
            finally:
                CLOCK.phase = before

        return evaluate

    _replaced(Trainer, "evaluate", evaluating)


@contextmanager
def counted_modules() -> Iterator[None]:
    """Count the modules of models that our code visits. All walks, also those for parameters, go this way."""
    import torch

    original = torch.nn.Module.named_modules

    def named_modules(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if CLOCK.is_ours:
            CLOCK.span.modules += 1
        yield from original(self, *args, **kwargs)

    torch.nn.Module.named_modules = named_modules  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.Module.named_modules = original  # type: ignore[method-assign]


LARGE = 2**20
"""A tensor of more elements is not made in the cases, but on the ``meta`` device, which has shapes alone."""


@dataclass
class Memory:
    """The bytes of the tensors that our code has made and that are still alive: now, and at most."""

    now: int = 0
    peak: int = 0

    def add(self, storage: Any) -> None:
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def counted_tensors(memory: Memory | None = None) -> Any:
    """Return a context that counts the operations of our code, and the tensors that they make.

    With ``memory`` it is that of a case: large tensors, and what is computed from them, are on the ``meta`` device. The
    time of the operations themselves is left out then, since that of a GPU is another.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    def tensors_in(tree: Any) -> list[Any]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    def on_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    def is_large(args: Any, kwargs: Any) -> bool:
        """Return whether an argument is large or on ``meta``, or the result will be large."""
        given = tensors_in((args, kwargs))
        sizes = [tensor.numel() for tensor in given]
        # A list of numbers is the size of a new tensor.
        asked = [value for value in args if isinstance(value, (list, tuple)) and all(isinstance(n, int) for n in value)]
        sizes += [math.prod(size) for size in asked]
        shapes = [tensor.shape for tensor in given]
        if len(shapes) > 1 and len(set(map(len, shapes))) == 1:
            sizes.append(math.prod(map(max, *shapes)))
        return max(sizes, default=0) > LARGE or any(tensor.is_meta for tensor in given)

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if not CLOCK.is_ours:
                return function(*args, **kwargs)
            begin = time.thread_time()
            name = function._schema.name.partition("::")[2]
            # The data that become a tensor are in one already where this is called.
            given = {} if name == "lift_fresh" else _storages(tensors_in((args, kwargs)))
            if memory is not None and name not in SYNCHRONISING and is_large(args, kwargs):
                args, kwargs = tree_map(on_meta, (args, kwargs))
            result = function(*args, **kwargs)
            made = [storage for key, storage in _storages(tensors_in(result)).items() if key not in given]
            span = CLOCK.span
            span.operations += 1
            span.synchronisations += name in SYNCHRONISING
            span.bytes += sum(storage.nbytes() for storage in made)
            span.largest = max([span.largest, *(tensor.numel() for tensor in tensors_in(result) if made)])
            if memory is not None:
                for storage in made:
                    memory.add(storage)
                CLOCK.exclude(time.thread_time() - begin)
            return result

    return Counted()


def _storages(tensors: Sequence[Any]) -> dict[int, Any]:
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


class Tokens:
    """The tokens, padding among them, that TRL gives models in each micro-batch, by training and micro-batch."""

    def __init__(self) -> None:
        self.by_micro_batch: Counter[tuple[int, int]] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        import torch

        call = torch.nn.Module.__call__

        def counting(module: Any, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            ids = kwargs.get("input_ids", args[0] if args else None)
            by_trl = "/trl/" in caller or caller.endswith("/transformers/trainer.py") or "/trl_hotfix/" in caller
            is_training = CLOCK.phase in (FIRST, STEPS)
            if is_training and by_trl and isinstance(ids, torch.Tensor) and ids.dtype == torch.long:
                self.by_micro_batch[CLOCK.trainings, CLOCK.micro_batch] += ids.numel()
            return call(module, *args, **kwargs)

        torch.nn.Module.__call__ = counting  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.nn.Module.__call__ = call  # type: ignore[method-assign]
