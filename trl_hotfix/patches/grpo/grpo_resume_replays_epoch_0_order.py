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

from ...authoring import absent, act_of_this_call, judge
from ...model import Outcome
from ...testing import default_arguments, stub_trainer


def begin_with_the_epoch_of_the_run(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a training sampler that first repeats the draws of the epochs before the one that is resumed."""
    import wrapt

    sampler = wrapped(*args, **kwargs)
    if getattr(sampler, "generator", None) is None:  # It does not shuffle.
        return sampler
    act = act_of_this_call()

    class ResumedSampler(wrapt.ObjectProxy):  # type: ignore[type-arg]
        _self_started = False

        def __iter__(self) -> Iterator[int]:
            # Before a training there is no epoch.
            if not self._self_started and instance.state.epoch is not None:
                for _ in range(int(instance.state.epoch)):
                    act()
                    # The sampler draws the order of a pass when its first index is requested.
                    next(iter(self.__wrapped__), None)
            self._self_started = True
            return iter(self.__wrapped__)

    return ResumedSampler(sampler)


def resumed_run_has_the_order_of_its_epoch(module: ModuleType) -> Outcome:
    """Resume runs of 8 prompts in their second and third epoch, and find the epochs whose orders they have."""
    method = next(name for name in ("GRPO", "RLOO", "Distillation") if hasattr(module, f"{name}Trainer"))
    if "_get_train_sampler" not in vars(getattr(module, f"{method}Trainer")):
        return absent("this release leaves the sampler to transformers")
    trainer = _trainer(module, method)
    uninterrupted = _orders(trainer, 0.0, 5)
    if any(uninterrupted.count(order) > 1 or sorted(order) != sorted(uninterrupted[0]) for order in uninterrupted):
        return absent("the order is the same in every epoch")
    outcomes = []
    # At the end of an epoch its last batch was trained on, and the next epoch begins.
    for resumed, epoch in ((trainer, 1.25), (trainer, 2.0), (trainer, 2.75), (_trainer(module, method), 1.0)):
        orders = _orders(resumed, epoch, 2)
        first = next((number for number in range(4) if uninterrupted[number : number + 2] == orders), None)
        if first is None:
            raise AssertionError(f"{orders} is no part of {uninterrupted}")
        outcomes.append(judge(float(first), right=float(int(epoch)), wrong=0.0, epoch=epoch))
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"some runs have the order of their epoch, and others have not: {outcomes}")
    for begin in (None, 0.75):
        if _orders(trainer, begin, 2) != uninterrupted[:2]:
            raise AssertionError(f"a run that begins at {begin} is not in its first epoch")
    if _orders(_trainer(module, method, rows=0), 1.5, 1) != [[]]:
        raise AssertionError("there are no prompts, and some are trained on")
    in_order = _trainer(module, method, shuffle_dataset=False)
    sampler = in_order._get_train_sampler()
    if getattr(sampler, "generator", None) is None and type(sampler) is not sampler.__class__:
        raise AssertionError("a sampler that does not shuffle is another one")
    return outcomes[0]


def _trainer(module: ModuleType, method: str, *, rows: int = 8, **settings: Any) -> Any:
    of_a_step = {"num_generations": 2, "generation_batch_size": 4, "steps_per_generation": 1, "seed": 42}
    of_a_step |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    return stub_trainer(
        getattr(module, f"{method}Trainer"),
        default_arguments(getattr(module, f"{method}Config"), **of_a_step, **settings),
        train_dataset=range(rows),
        state=SimpleNamespace(),
    )


def _orders(trainer: Any, epoch: float | None, count: int) -> list[list[int]]:
    """Return the orders of ``count`` epochs of a run that begins at ``epoch``."""
    sampler, orders = trainer._get_train_sampler(), []
    # transformers reads this from the checkpoint before the first batch.
    trainer.state.epoch = epoch
    for number in range(int(epoch or 0), int(epoch or 0) + count):
        # A release with such a method may be one that is fixed.
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        orders.append(list(sampler))
    return orders
