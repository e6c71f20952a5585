"""Observe, inside one release, when trainers call the targets of patches.

Every target is replaced by a plain function that looks up the stack: the innermost method of a trainer there whose name
is in ``MOMENTS`` tells the moment, and it tells whose call it is.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any

from trl_hotfix.model import Target
from trl_hotfix.verification import cells

MOMENTS = {
    "__init__": "construction",
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"), "dataloader"),
    "get_batch_samples": "data",
    "training_step": "step",
    **dict.fromkeys(("evaluation_loop", "prediction_loop"), "evaluation"),
    # Before its loop evaluate() prepares a dataset that it is given.
    **dict.fromkeys(("evaluate", "predict"), "evaluate"),
    **dict.fromkeys(("_save_checkpoint", "save_model"), "save"),
    **dict.fromkeys(("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"), "resume"),
    **dict.fromkeys(("train", "_inner_training_loop"), "training"),
}
"""The moment of each method of a trainer that tells one. ``training`` is what is between the steps: logs, callbacks."""

FETCH = "torch.utils.data._utils.fetch"


@dataclass
class TrainerRecord:
    """One trainer: the targets that its class has, and the calls of each in its construction and in its steps."""

    trainer: Any
    has: list[str] = field(default_factory=list)
    constructed: bool = False
    construction: Counter[str] = field(default_factory=Counter)
    steps: list[dict[str, Any]] = field(default_factory=list)
    step: Counter[str] | None = None
    """The calls in the step that runs now."""
    generations: int = 0


@dataclass
class Observed:
    """What all trainers of a process have called."""

    by_moment: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    trainers: dict[int, TrainerRecord] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)

    def of(self, trainer: Any) -> TrainerRecord:
        """Return the record of ``trainer``. Records keep their trainers, so no other trainer gets the same number."""
        record = self.trainers.setdefault(id(trainer), TrainerRecord(trainer))
        if not record.has:
            record.has = [name for name, owner in self.owners.items() if has(trainer, owner, name)]
        return record

    def note(self, name: str, arguments: tuple[Any, ...], frame: FrameType | None) -> None:
        own = MOMENTS.get(name.rpartition(".")[2])
        moment, trainer = where(frame)
        if own is not None and arguments and is_trainer(arguments[0]):
            moment, trainer = own, arguments[0]
        if moment is None:
            return
        self.by_moment[name][moment] += 1
        if trainer is not None:
            record = self.of(trainer)
            if moment == "construction":
                record.construction[name] += 1
            if record.step is not None:
                record.step[name] += 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "moments": self.by_moment,
            "trainers": [
                {
                    "class": type(record.trainer).__name__,
                    "has": record.has,
                    "construction": record.construction if record.constructed else None,
                    "steps": record.steps,
                }
                for record in self.trainers.values()
            ],
        }


def observe(targets: Iterable[Target], imported: Collection[str]) -> Observed:
    """Replace every target by a function that notes its calls. ``imported`` are the functions that imports called."""
    observed = Observed()
    for name, target in {target.name: target for target in targets}.items():
        if name in imported:
            observed.by_moment[name]["import"] += 1
        _replace(observed, name, target)
    _follow_trainers(observed)
    return observed


def _replace(observed: Observed, name: str, target: Target) -> None:
    owner: Any = cells.imported(target.module)
    *steps, attribute = target.attribute.split(".")
    for step in steps:
        owner = getattr(owner, step)
    function = getattr(owner, attribute)
    assert isinstance(function, FunctionType), name
    is_static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        observed.note(name, args, sys._getframe(1))
        return function(*args, **kwargs)

    observed.owners[name] = owner
    setattr(owner, attribute, staticmethod(counted) if is_static else counted)
    # A name under which a module has imported a function is a target for the calls of that module alone.
    if isinstance(owner, ModuleType) and function.__module__ == owner.__name__:
        for module_name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and f"{module_name}.".startswith("trl."):
                for key in [key for key, value in list(vars(module).items()) if value is function]:
                    setattr(module, key, counted)


def has(trainer: Any, owner: Any, name: str) -> bool:
    """Return whether the trainer has the target: its class does not override it, or it is no method of a trainer.

    A constructor of TRL calls that of its base, so a subclass that overrides it has it too. A target on the base of
    TRL's trainers is for all of them, those included that override it and leave the base out.
    """
    from transformers import Trainer

    if not (isinstance(owner, type) and issubclass(owner, Trainer)):
        return True
    attribute = name.rpartition(".")[2]
    if attribute == "__init__" or owner.__module__ == "trl.trainer.base_trainer":
        return isinstance(trainer, owner)
    definer = next((cls for cls in type(trainer).__mro__ if attribute in vars(cls)), None)
    return definer is owner


def is_trainer(value: Any) -> bool:
    from transformers import Trainer

    return isinstance(value, Trainer)


def where(frame: FrameType | None) -> tuple[str | None, Any]:
    """Return the moment in which the code of ``frame`` runs, and the trainer that runs it; or None twice."""
    moment = None
    while frame is not None:
        code = frame.f_code
        if moment is None and code.co_name == "fetch" and frame.f_globals.get("__name__") == FETCH:
            moment = "data"
        if code.co_name in MOMENTS and is_trainer(frame.f_locals.get("self")):
            return moment or MOMENTS[code.co_name], frame.f_locals["self"]
        frame = frame.f_back
    return moment, None


def _follow_trainers(observed: Observed) -> None:
    """Note where trainers are made, where an optimizer step begins and ends, and how often one generates in it."""
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

    def after(cls: type, name: str, do: Callable[[Any], None]) -> None:
        original = getattr(cls, name)

        @functools.wraps(original)
        def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            trainer = self if is_trainer(self) else where(sys._getframe(1))[1]
            if trainer is not None:
                do(observed.of(trainer))
            return result

        setattr(cls, name, followed)

    def made(record: TrainerRecord) -> None:
        record.constructed = True

    def begin(record: TrainerRecord) -> None:
        _count_generations(record)
        record.step, record.generations = Counter(), 0

    def end(record: TrainerRecord) -> None:
        step = {"calls": record.step or {}, "generations": record.generations}
        step["vllm"] = bool(getattr(record.trainer.args, "use_vllm", False))
        record.steps.append(step)
        record.step = None

    after(Trainer, "__init__", made)
    after(CallbackHandler, "on_step_begin", begin)
    after(CallbackHandler, "on_step_end", end)


def _count_generations(record: TrainerRecord) -> None:
    models = (record.trainer.model, getattr(record.trainer, "teacher_model", None))
    for model, name in itertools.product(models, ("generate", "generate_batch")):
        original = getattr(model, name, None)
        if original is None or hasattr(original, "counted"):
            continue

        def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            record.generations += 1
            return original(*args, **kwargs)

        counted.counted = True  # type: ignore[attr-defined]
        setattr(model, name, counted)
