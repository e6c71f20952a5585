"""Run inside one release: trainers in many shapes, and what their records say beside what their gradients were.

    python -m bench.inside.shapes OUT.json CASE...

A case is ``TRAINER METHOD MOMENT SHAPE``, with ``strict`` behind it or without: a made-up patch of this method of the
real trainer, declared as called at this moment, and a way in which a user's program meets it. Each case trains for two
steps in a fork. The learning rate is 0, so that the gradient of a step is that of the patched or of the unpatched
trainer, whatever the other step was.
The answer has the gradient of each step, and what the record says.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import trl_hotfix
from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import fingerprints
from trl_hotfix.model import Called, Hit, Outcome, Patch, Severity, Target, Upstream, Verdict
from trl_hotfix.patching.wrappers import reference_of

import tiny
from bench.inside import trainers

ID = "made-up"
Make = Callable[[], Any]

# What the patches do. Each changes the gradient of every step, or the loss of every evaluation.


def scale_the_loss(call: Any) -> Any:
    result = call()
    return (result[0] * 3, *result[1:]) if isinstance(result, tuple) else result * 3


def scale_the_gradients(call: Any) -> Any:
    result = call()
    for parameter in call.trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(3)
    call.act()
    return result


def move_the_weights(call: Any) -> Any:
    import torch

    result = call()
    with torch.no_grad():
        for parameter in call.trainer.model.parameters():
            parameter.mul_(1.5)
    call.act()
    return result


def take_one_row(call: Any) -> Any:
    rows = call()
    return rows.select([3] * len(rows))


def repeat_the_first(call: Any) -> Any:
    """Return batches whose rows are all like the first."""
    batches, number = call()
    repeated = [
        {name: value[[0] * len(value)] if getattr(value, "ndim", 0) > 1 else value for name, value in batch.items()}
        for batch in batches
    ]
    return repeated, number


def scale_the_advantages(call: Any) -> Any:
    result = call()
    return {**result, "advantages": result["advantages"] * 3}


METHODS: dict[str, Callable[[Any], Any]] = {
    "compute_loss": scale_the_loss,
    "get_batch_loss_metrics": scale_the_loss,
    "_compute_loss": scale_the_loss,
    "training_step": scale_the_gradients,
    "__init__": move_the_weights,
    "_prepare_dataset": take_one_row,
    "get_train_dataloader": move_the_weights,
    "_generate_and_score_completions": scale_the_advantages,
    "prediction_step": scale_the_loss,
    "get_batch_samples": repeat_the_first,
    "_save_checkpoint": move_the_weights,
    "_load_optimizer_and_scheduler": move_the_weights,
}


def settings(name: str, method: str) -> dict[str, Any]:
    saves = {"save_strategy": "steps", "save_steps": 1} if method == "_save_checkpoint" else {"save_strategy": "no"}
    plain = {"learning_rate": 0.0, "max_steps": 2, "optim": "sgd", "output_dir": "out", **saves}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1} if name in ("DPO", "KTO") else {}
    return {**plain, **evaluates}


class World:
    """A trainer class of TRL, and a patch of one of its methods."""

    def __init__(self, name: str, method: str, moment: str, *, strict: bool = False) -> None:
        self.name, self.method, self.strict = name, method, strict
        self.cls, _ = tiny.classes(name)
        # In some releases the public class only warns, and is derived from the one with the code.
        self.cls = next(cls for cls in self.cls.__mro__ if cls.__module__.endswith("_trainer"))
        self.leaf: ModuleType = importlib.import_module(self.cls.__module__)
        self.original = getattr(self.cls, method)
        self.steps: list[float] = []
        code = ModuleType(modules.module_of(ID))
        wrapper = METHODS[method]
        wrapper.takes_call = True  # type: ignore[attr-defined]
        code.wrapper, code.self_test = wrapper, self._self_test  # type: ignore[attr-defined]
        sys.modules[code.__name__] = code
        target = Target(self.leaf.__name__, f"{self.cls.__name__}.{method}", "wrapper", called=Called(moment))
        self.patch = Patch(
            id=ID,
            revision=1,
            title="a made-up patch",
            severity=Severity.WRONG_LOSS,
            trl=">=0.9.6",
            upstream=Upstream(),
            why="",
            how="",
            targets=(target,),
            self_test="self_test",
            hits=(Hit((name,), "its numbers are others"),) if strict else (),
        )
        bodies = SimpleNamespace(verdict=lambda *arguments: "buggy", at=lambda *arguments: None)
        setattr(loading, "load", lambda: (self.patch,))  # noqa: B010
        setattr(fingerprints, "bodies", lambda: bodies)  # noqa: B010

    def _self_test(self, module: ModuleType) -> Outcome:
        is_on = reference_of(vars(self.cls).get(self.method)) is not None
        return Outcome(Verdict.FIXED if is_on else Verdict.REPRODUCED)

    def apply(self) -> None:
        assert trl_hotfix.apply()[ID].state.value in ("applied", "unreached")

    def made(self, cls: type | None = None, callbacks: tuple[Any, ...] = ()) -> Any:
        """Return a trainer of this class that notes its gradients. It has a callback of ours."""
        _, config = tiny.classes(self.name)
        before = trainers.classes
        setattr(trainers, "classes", lambda wanted: (cls or self.cls, config))  # noqa: B010
        try:
            trainer = trainers.TRAINERS[self.name](**settings(self.name, self.method))
        finally:
            setattr(trainers, "classes", before)  # noqa: B010
        for callback in (trl_hotfix.HotfixCallback(strict=self.strict), *callbacks):
            trainer.add_callback(callback)
        return trainer

    def derived(self, **attributes: Any) -> type:
        return type("Mine", (self.cls,), {"__module__": "project", **attributes})

    def overriding(self, body: Callable[[type, Any, tuple[Any, ...], dict[str, Any]], Any]) -> type:
        """Return a subclass whose method is ``body(its class, self, args, kwargs)``."""

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return body(mine, self, args, kwargs)

        mine = self.derived(**{self.method: method})
        return mine


# The shapes. Each returns a trainer that is ready to train.


def plain(world: World) -> Any:
    world.apply()
    return world.made()


def unpatched(world: World) -> Any:
    return world.made()


def observed(world: World) -> Any:
    trl_hotfix.apply(observe=True)
    return world.made()


def derived(world: World) -> Any:
    world.apply()
    return world.made(world.derived())


def calls_super(world: World) -> Any:
    world.apply()
    name = world.method
    return world.made(
        world.overriding(lambda cls, self, args, kwargs: getattr(super(cls, self), name)(*args, **kwargs))
    )


def calls_super_twice(world: World) -> Any:
    world.apply()
    name = world.method

    def body(cls: type, self: Any, args: Any, kwargs: Any) -> Any:
        getattr(super(cls, self), name)(*args, **kwargs)
        return getattr(super(cls, self), name)(*args, **kwargs)

    return world.made(world.overriding(body))


def has_its_own(world: World) -> Any:
    """Its own code does what TRL's unpatched method does."""
    world.apply()
    return world.made(world.overriding(lambda cls, self, args, kwargs: world.original(self, *args, **kwargs)))


def names_super_and_does_not_call_it(world: World) -> Any:
    world.apply()
    name, original = world.method, world.original

    def body(cls: type, self: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self, "never", False):
            return getattr(super(cls, self), name)(*args, **kwargs)
        return original(self, *args, **kwargs)

    return world.made(world.overriding(body))


def its_own_in_training(world: World) -> Any:
    """It calls TRL's method in evaluations only."""
    world.apply()
    name, original = world.method, world.original

    def body(cls: type, self: Any, args: Any, kwargs: Any) -> Any:
        if not hasattr(self, "model") or self.model.training:
            return original(self, *args, **kwargs)
        return getattr(super(cls, self), name)(*args, **kwargs)

    return world.made(world.overriding(body))


def super_in_every_other_step(world: World) -> Any:
    world.apply()
    name, original = world.method, world.original

    def body(cls: type, self: Any, args: Any, kwargs: Any) -> Any:
        state = getattr(self, "state", None)
        if state is None or state.global_step % 2 == 0:
            return getattr(super(cls, self), name)(*args, **kwargs)
        return original(self, *args, **kwargs)

    return world.made(world.overriding(body))


def by_a_helper(world: World) -> Any:
    world.apply()

    def helper(parent: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(parent, name)(*args, **kwargs)

    name = world.method
    return world.made(world.overriding(lambda cls, self, args, kwargs: helper(super(cls, self), name, *args, **kwargs)))


def by_an_alias(world: World) -> Any:
    world.apply()
    base, name = world.cls, world.method
    return world.made(world.overriding(lambda cls, self, args, kwargs: getattr(base, name)(self, *args, **kwargs)))


def with_a_mixin(world: World) -> Any:
    world.apply()
    original = world.original
    mixin = type("Mixin", (), {world.method: lambda self, *args, **kwargs: original(self, *args, **kwargs)})
    return world.made(type("Mine", (mixin, world.cls), {"__module__": "project"}))


def with_a_mixin_that_calls_super(world: World) -> Any:
    world.apply()
    name = world.method

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(mixin, self), name)(*args, **kwargs)

    mixin = type("Mixin", (), {name: method})
    return world.made(type("Mine", (mixin, world.cls), {"__module__": "project"}))


def a_copy_of_the_class(world: World) -> Any:
    """Its own class has methods of the same code, and the base of TRL's."""
    body = {name: value for name, value in vars(world.cls).items() if name not in ("__dict__", "__weakref__")}
    copied = type(world.cls.__name__, world.cls.__bases__, {**body, "__module__": "project"})
    for name, function in list(vars(copied).items()):
        if isinstance(function, types.FunctionType) and function.__closure__:
            cells = tuple(
                types.CellType(copied) if cell.cell_contents is world.cls else cell for cell in function.__closure__
            )
            again = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__, cells)
            again.__kwdefaults__, again.__dict__ = function.__kwdefaults__, {**function.__dict__}
            setattr(copied, name, again)
    world.apply()
    return world.made(copied)


def a_copy_of_a_trainer(world: World) -> Any:
    world.apply()
    return copied(world.made())


def a_copy_of_a_trainer_made_before(world: World) -> Any:
    trainer = world.made()
    world.apply()
    return copied(trainer)


def copied(trainer: Any) -> Any:
    """Return a deep copy. What cannot be copied, such as the accelerator, is shared."""
    shared = ("accelerator", "callback_handler", "control", "state", "train_dataset", "eval_dataset", "data_collator")
    # GRPO of 0.24.0 has the keys of the parameters of the model's forward, a view.
    kept = {
        id(value): value
        for name, value in vars(trainer).items()
        if name in shared or isinstance(value, type(OrderedDict().keys()))
    }
    return copy.deepcopy(trainer, kept)


def made_before(world: World) -> Any:
    trainer = world.made()
    world.apply()
    return trainer


def of_another_class_since(world: World) -> Any:
    """Its class is changed to one with a method of its own after it was made."""
    world.apply()
    trainer = world.made()
    trainer.__class__ = world.overriding(lambda cls, self, args, kwargs: world.original(self, *args, **kwargs))
    return trainer


def beside_an_unused_class(world: World) -> Any:
    world.apply()
    world.unused = world.overriding(lambda cls, self, args, kwargs: world.original(self, *args, **kwargs))  # type: ignore[attr-defined]
    return world.made()


def with_a_method_of_its_own(world: World) -> Any:
    world.apply()
    trainer = world.made()
    setattr(trainer, world.method, MethodType(world.original, trainer))
    return trainer


def applied_in_the_middle(world: World) -> Any:
    return world.made(callbacks=(at_the_end_of_step(1, world.apply),))


def reverted_in_the_middle(world: World) -> Any:
    world.apply()
    return world.made(callbacks=(at_the_end_of_step(1, trl_hotfix.revert),))


def probed_by_a_callback(world: World) -> Any:
    """Its own code in training, and TRL's method on a batch between the steps."""
    world.apply()
    trainer = world.made(world.overriding(lambda cls, self, args, kwargs: world.original(self, *args, **kwargs)))

    def probe() -> None:
        rows = [trainer.train_dataset[0], trainer.train_dataset[1]]
        method = getattr(world.cls, world.method)
        if world.method in ("compute_loss", "prediction_step"):
            batch = trainer._prepare_inputs(trainer.data_collator(rows))
            arguments = (False,) if world.method == "prediction_step" else ()
            method(trainer, trainer.model, batch, *arguments)

    if world.method in ("compute_loss", "prediction_step") and world.name != "GRPO":
        trainer.add_callback(at_the_end_of_step(1, probe))
    return trainer


def at_the_end_of_step(number: int, act: Callable[[], Any]) -> Any:
    from transformers import TrainerCallback

    class Acts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == number:
                act()

    return Acts()


SHAPES: dict[str, Callable[[World], Any]] = {
    shape.__name__.replace("_", "-"): shape
    for shape in (
        plain,
        unpatched,
        observed,
        derived,
        calls_super,
        calls_super_twice,
        has_its_own,
        names_super_and_does_not_call_it,
        its_own_in_training,
        super_in_every_other_step,
        by_a_helper,
        by_an_alias,
        with_a_mixin,
        with_a_mixin_that_calls_super,
        a_copy_of_the_class,
        a_copy_of_a_trainer,
        a_copy_of_a_trainer_made_before,
        made_before,
        of_another_class_since,
        beside_an_unused_class,
        with_a_method_of_its_own,
        applied_in_the_middle,
        reverted_in_the_middle,
        probed_by_a_callback,
    )
}


def run(case: str) -> dict[str, Any]:
    """Train, and return the length of the gradient of each step, the losses of evaluations, and the record.

    Under strict also the step after which it ended the run, or None.
    """
    name, method, moment, shape, *strict = case.split(" ")
    logging.getLogger("trl_hotfix").setLevel(logging.CRITICAL)
    world = World(name, method, moment.replace("-", " "), strict=bool(strict))
    trainer = SHAPES[shape](world)
    lengths: list[str] = []
    trainers.note_gradients(trainer, lengths)
    try:
        trainer.train()
    except trl_hotfix.NotAppliedError:
        return {"gradients": lengths, "ended": trainer.state.global_step}
    record = json.loads(Path("out/trl_hotfix.json").read_text(encoding="utf-8"))
    evaluations = [repr(entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    return {
        "gradients": lengths,
        "evaluations": evaluations,
        "entry": next((entry for entry in record["patches"] + record.get("reverted", []) if entry["id"] == ID), None),
        "unreached": [entry["reason"] for entry in record.get("unreached", []) if entry["id"] == ID],
        "problems": record.get("problems", []),
        "ended": None,
    }


if __name__ == "__main__":
    trainers.answer_each(run, *sys.argv[1:])
