"""A GRPO, RLOO or distillation run that is resumed after its first epoch goes through the data in the wrong order.

``RepeatSampler`` (``RepeatRandomSampler`` up to 0.16) draws one permutation per epoch from a generator that it seeds
when it is created, so the order of epoch ``n`` is draw number ``n``. A resumed run creates a new sampler, which begins
with draw 0.

A ``set_epoch`` method, by which transformers and accelerate tell a sampler its epoch, would not repair this: accelerate
(1.0, 1.1 and 1.12, for example) sets the epoch of the loader that skips batches to 0 again, and transformers 5 sets it
on that loader only, from which it does not reach the sampler on several ranks. The sampler reads the epoch from the
trainer instead, whose state is loaded from the checkpoint before the first batch. It repeats the earlier draws in its
own way of drawing, so its generator has the right state on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, judge
from ..model import Outcome
from ..testing import default_arguments, stub_trainer


def begin_with_the_epoch_of_the_run(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a training sampler that first repeats the draws of the epochs before the one that is resumed."""
    import wrapt

    sampler = wrapped(*args, **kwargs)
    if getattr(sampler, "generator", None) is None or hasattr(sampler, "set_epoch"):
        return sampler

    class ResumedSampler(wrapt.ObjectProxy):  # type: ignore[type-arg]
        _self_started = False

        def __iter__(self) -> Iterator[int]:
            finished_epochs = 0 if self._self_started else int(instance.state.epoch or 0)
            self._self_started = True
            for _ in range(finished_epochs):
                # The sampler draws the order of a pass when its first index is requested.
                next(iter(self.__wrapped__), None)
            return iter(self.__wrapped__)

    return ResumedSampler(sampler)


def resumed_run_has_the_order_of_its_epoch(module: ModuleType) -> Outcome:
    """Resume a run of 8 prompts in the middle of its second epoch, and find the epoch whose order it has."""
    method = next(name for name in ("GRPO", "RLOO", "Distillation") if hasattr(module, f"{name}Trainer"))
    trainer_class = getattr(module, f"{method}Trainer")
    if "_get_train_sampler" not in vars(trainer_class):
        return absent("this release leaves the sampler to transformers")

    def orders(epoch: float, count: int) -> list[list[int]]:
        settings = {"num_generations": 2, "generation_batch_size": 4, "steps_per_generation": 1, "seed": 42}
        trainer = stub_trainer(
            trainer_class,
            default_arguments(getattr(module, f"{method}Config"), **settings, gradient_accumulation_steps=1),
            train_dataset=range(8),
            # transformers has read this from the checkpoint before the first batch.
            state=SimpleNamespace(epoch=epoch),
        )
        trainer.args.per_device_train_batch_size = 4
        sampler, passes = trainer._get_train_sampler(), []
        for number in range(int(epoch), int(epoch) + count):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
            passes.append(list(sampler))
        return passes

    uninterrupted, resumed = orders(0.0, 3), orders(1.25, 2)
    if uninterrupted[0] in uninterrupted[1:] or sorted(uninterrupted[0]) != sorted(uninterrupted[1]):
        return absent("the order is the same in every epoch")
    first_epoch = next((number for number in range(2) if uninterrupted[number : number + 2] == resumed), None)
    if first_epoch is None:
        raise AssertionError(f"{resumed} is no part of {uninterrupted}")
    return judge(float(first_epoch), right=1.0, wrong=0.0)
