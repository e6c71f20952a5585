"""A run with ``group_by_length`` that is resumed within an epoch repeats rows and skips others.

The sampler of transformers draws the order of an epoch from torch's global generator when the epoch begins. A resumed
run has another state of it there, so the rest of the epoch is cut from another order (transformers issue 48025). On
several ranks each draws its own order: the ranks' generators part as soon as one rank draws more than another.

All ranks, and a resumed run, can draw the right order again: by the seed and the number of the epoch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import class_with_steps, default_arguments, stub_trainer


@wrapper
def order_by_the_epoch(call: Call) -> Any:
    """Return a sampler that draws the order of an epoch from the seed and the number of the epoch."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    sampler = call()
    if type(sampler) is not LengthGroupedSampler or sampler.generator is not None:
        return sampler
    return _by_epoch(sampler, call.trainer, call.act_later())


def _by_epoch(grouped: Any, trainer: Any, act: Callable[[], None]) -> Any:
    import torch

    class ByEpoch(torch.utils.data.Sampler):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(grouped)

        def __iter__(self) -> Iterator[int]:
            act()
            seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
            # At the begin of an epoch the state has its number, and in the middle of a resumed one a fraction more.
            grouped.generator = torch.Generator().manual_seed(seed + int(trainer.state.epoch or 0))
            return iter(grouped)

    return ByEpoch()


def an_epoch_has_one_order(module: ModuleType) -> Outcome:
    """Draw the order of an epoch twice, as a run and its resumed run do, from two states of the generator."""
    import torch
    import transformers

    trainer_class = class_with_steps(module)
    if trainer_class is None or any(base.__module__.startswith("trl.") for base in trainer_class.__mro__[1:]):
        return absent("this module has no trainer, one with a loop of its own, or one with a base in TRL")
    if "train_dataset" not in inspect.signature(transformers.Trainer._get_train_sampler).parameters:
        return absent("this transformers draws the orders of the epochs before again")
    grouped: dict[str, Any] = {"group_by_length": True, "train_sampling_strategy": "group_by_length"}
    sizes = {"train_batch_size": 1, "world_size": 1, "process_index": 0}
    trainer = stub_trainer(
        trainer_class,
        default_arguments(transformers.TrainingArguments, **grouped, **sizes),
        train_dataset=[{"input_ids": [5]}] * 16,
        processing_class=SimpleNamespace(model_input_names=["input_ids"]),
        state=SimpleNamespace(epoch=1.25),
    )
    orders = []
    for seed in range(2):
        torch.manual_seed(seed)
        orders.append(list(trainer._get_train_sampler(trainer.train_dataset)))
    return judge(int(orders[0] == orders[1]), right=1, wrong=0)
