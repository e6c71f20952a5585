"""A run that is resumed within a later epoch goes on in the order of its first epoch.

accelerate draws the order of an epoch from a seed and the number of the epoch. When a pass begins, the loader gives the
number to ``SeedableRandomSampler``. ``skip_first_batches`` makes a new loader for the rest of an epoch, and from
accelerate 1.7.0 to 1.14.0 that one begins to count at 0. 1.15.0 hands the number on (accelerate pull request 4071). Up
to 1.6 the new loader does not reach the sampler. transformers 5 gives the new loader the epoch before its pass.

The sampler belongs to the loader of this trainer. It has a method of its own that does not go back behind the epoch of
the trainer, whose state is loaded from the checkpoint before the first batch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import class_with_steps, default_arguments, stub_trainer


@wrapper
def keep_the_epoch_of_the_run(call: Call) -> Any:
    """Return the loader of the training, whose sampler does not go back to an earlier epoch."""
    loader, act = call(), call.act_later()
    sampler = _innermost(getattr(loader, "batch_sampler", None))
    if isinstance(sampler, _accelerate().SeedableRandomSampler):
        sampler.set_epoch = functools.partial(_set_epoch, call.trainer, sampler.set_epoch, act)
    return loader


def _accelerate() -> Any:
    return importlib.import_module("accelerate.data_loader")


def _innermost(batch_sampler: Any) -> Any:
    """Return the sampler of a batch sampler, which ranks share by others around it."""
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return getattr(batch_sampler, "sampler", None)


def _set_epoch(trainer: Any, set_epoch: Callable[[int], None], act: Callable[[], None], epoch: int) -> None:
    of_run = int(trainer.state.epoch or 0) if getattr(trainer, "is_in_train", False) else 0
    if epoch < of_run:
        act()
    set_epoch(max(epoch, of_run))


def resumed_run_is_in_its_epoch(module: ModuleType) -> Outcome:
    """Resume a run in its second epoch, and ask the sampler which epoch it has when the pass begins."""
    import accelerate  # type: ignore[import-untyped]
    import torch
    import transformers
    from packaging.version import Version
    from torch.utils.data import BatchSampler

    beneath, trainer_class = _accelerate(), class_with_steps(module)
    if trainer_class is None or any(base.__module__.startswith("trl.") for base in trainer_class.__mro__[1:]):
        return absent("this module has no trainer, one with a loop of its own, or one with a base in TRL")
    if int(transformers.__version__.partition(".")[0]) >= 5:
        return absent("transformers tells the loader its epoch after it has skipped batches")
    if not Version("1.7") <= Version(accelerate.__version__) < Version("1.15"):
        return absent("accelerate hands the epoch on, or does not reach the sampler")
    rows, one_process = list(range(8)), SimpleNamespace(distributed_type="NO", _add_dataloader=len)
    sampler = beneath.SeedableRandomSampler(rows, generator=torch.Generator())
    trainer = stub_trainer(
        trainer_class,
        default_arguments(transformers.TrainingArguments, process_index=0, precompute_ref_log_probs=False),
        train_dataset=rows,
        data_collator=list,
        is_in_train=True,
        state=SimpleNamespace(epoch=1.25),
        _train_batch_size=2,
        _get_train_sampler=lambda *args: None,
        _get_collator_with_removed_columns=lambda collator, description: collator,
    )
    with ExitStack() as stack:
        for name in ("PartialState", "GradientState"):
            stack.enter_context(shadowed(beneath, name, lambda: one_process))
        trainer.accelerator.prepare = lambda loader: beneath.DataLoaderShard(
            rows, batch_sampler=BatchSampler(sampler, 2, False), collate_fn=list
        )
        loader = trainer.get_train_dataloader()
        loader.set_epoch(1)
        skipping = beneath.skip_first_batches(loader, 1)
        # So begins its pass, which would draw from the random state of the process.
        skipping.set_epoch(skipping.iteration)
    return judge(sampler.epoch, right=1, wrong=0)
