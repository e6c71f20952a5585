"""A GRPO, RLOO or distillation run that is resumed after its first epoch goes through the data in the wrong order.

``RepeatSampler`` (``RepeatRandomSampler`` up to 0.16) draws one permutation an epoch from a generator that it seeds
when it is made, so the order of epoch ``n`` is draw number ``n``. A resumed run makes a new sampler and begins with
draw 0: it skips as many batches as epoch ``n`` had trained on, but in the order of epoch 0. Some prompts of the epoch
are trained on twice and others never, and all later epochs have the order of an earlier one.

transformers and accelerate would tell a sampler of its epoch by ``set_epoch``, which this one does not have. To give it
one would not do: accelerate (1.0, 1.1 and 1.12, for three) sets the epoch of the loader that skips batches to 0 again,
and transformers 5 sets it on that loader only, from which, on several ranks, it does not reach the sampler. So the
training's sampler asks the trainer instead, whose state is read from the checkpoint before the first batch: at its
first pass it makes the draws of the epochs that lie behind, the way it makes them itself. Its generator is then where
that of the uninterrupted run was, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, judge
from ..model import Outcome
from ..stubs import default_arguments, stub_trainer


def begin_with_the_epoch_of_the_run(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The sampler of the training, which makes up for the draws of the epochs before the one that is resumed."""
    import wrapt

    sampler = wrapped(*args, **kwargs)
    if getattr(sampler, "generator", None) is None or hasattr(sampler, "set_epoch"):
        return sampler

    class ResumedSampler(wrapt.ObjectProxy):  # type: ignore[type-arg]
        _self_begun = False

        def __iter__(self) -> Iterator[int]:
            behind = 0 if self._self_begun else int(instance.state.epoch or 0)
            self._self_begun = True
            for _ in range(behind):
                # A pass is drawn when its first index is asked for.
                next(iter(self.__wrapped__), None)
            return iter(self.__wrapped__)

    return ResumedSampler(sampler)


def resumed_run_has_the_order_of_its_epoch(module: ModuleType) -> Outcome:
    """Of 8 prompts in three epochs: which epoch's order does a run have that is resumed in the middle of the second?"""
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
            # What transformers has read from the checkpoint by the time of the first batch.
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
    begins = next((number for number in range(2) if uninterrupted[number : number + 2] == resumed), None)
    if begins is None:
        raise AssertionError(f"{resumed} is no part of {uninterrupted}")
    return judge(float(begins), right=1.0, wrong=0.0)
