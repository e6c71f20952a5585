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

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer, trainer_and_config


@wrapper
def begin_with_the_epoch_of_the_run(call: Call) -> Any:
    """Return a training sampler that first repeats the draws of the epochs before the one that is resumed."""
    import wrapt

    sampler, trainer = call(), call.trainer
    if getattr(sampler, "generator", None) is None:  # It does not shuffle.
        return sampler
    act = call.act_later()

    class ResumedSampler(wrapt.ObjectProxy):  # type: ignore[type-arg]
        _self_started = False

        def __iter__(self) -> Iterator[int]:
            # Before a training there is no epoch.
            if not self._self_started and trainer.state.epoch is not None:
                for _ in range(int(trainer.state.epoch)):
                    act()
                    # The sampler draws the order of a pass when its first index is requested.
                    next(iter(self.__wrapped__), None)
            self._self_started = True
            return iter(self.__wrapped__)

    return ResumedSampler(sampler)


def resumed_run_has_the_order_of_its_epoch(module: ModuleType) -> Outcome:
    """Resume a run of 8 prompts in its second epoch, and find the epoch whose order it has."""
    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO", "Distillation")
    if "_get_train_sampler" not in vars(trainer_class):
        return absent("this release leaves the sampler to transformers")
    of_a_step = {"num_generations": 2, "generation_batch_size": 4, "steps_per_generation": 1, "seed": 42}
    of_a_step |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    trainer = stub_trainer(
        trainer_class,
        default_arguments(config_class, **of_a_step),
        train_dataset=range(8),
        state=SimpleNamespace(epoch=0.0),
    )
    sampler = trainer._get_train_sampler()
    orders = [list(sampler), list(sampler)]
    if orders[0] == orders[1]:
        return absent("the order is the same in every epoch")
    resumed = trainer._get_train_sampler()
    # transformers reads this from the checkpoint before the first batch.
    trainer.state.epoch = 1.25
    # A release with such a method may be one that is fixed.
    if hasattr(resumed, "set_epoch"):
        resumed.set_epoch(1)
    return judge(orders.index(list(resumed)), right=1, wrong=0)
