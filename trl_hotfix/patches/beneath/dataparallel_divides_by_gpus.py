"""``torch.nn.DataParallel`` gives each GPU its rows, and ``num_items_in_batch`` of all of them, or none.

Started by plain ``python`` on a machine with several GPUs, ``Trainer`` wraps the model in ``DataParallel``. The model
divides the loss of each GPU by the items of the whole step, and ``Trainer.training_step`` takes the mean over the GPUs:
the loss is divided once too often. From 4.51 on the items are a tensor of one element. ``DataParallel`` cannot split
it, and calls the model on the first GPU only. transformers 4.57 hands over one element for each GPU. 4.46.2 to 4.47.0
and 4.50 fail: their tensor has no dimension to split. 4.48.0 hands the model no items.

A number goes to every GPU as it is. Divided by the GPUs, it makes the mean over them the loss of all rows.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer


@wrapper
def share_the_items(call: Call) -> Any:
    """Hand over the items of a step as a number that each GPU divides by. The last batch may not fill all GPUs."""
    from torch.nn import DataParallel

    trainer, model, items = call.trainer, call["model"], call["num_items_in_batch"]
    if items is None or not isinstance(model, DataParallel) or trainer.compute_loss_func or trainer.label_smoother:
        return call()
    gpus = len(call["inputs"]["labels"].chunk(max(len(model.device_ids), 1)))
    return call() if gpus == 1 else call.with_(num_items_in_batch=float(items) / gpus)()


def all_gpus_are_trained_on(module: ModuleType) -> Outcome:
    """Differentiate the loss of two rows of three tokens on two GPUs. The derivative of a token's loss is 1."""
    import torch
    import transformers
    from packaging.version import Version

    trainer_class, version = module.SFTTrainer, Version(transformers.__version__)
    is_silent = Version("4.47.1") <= version < Version("4.57") and version.release[:2] != (4, 50)
    if not is_silent or version == Version("4.48.0"):
        return absent("this transformers gives each GPU its items or the model none, or fails")
    if module_of(trainer_class.training_step) is module:
        return absent("this release fails on several GPUs where transformers has the bug")

    class TwoGpus(torch.nn.DataParallel):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.device_ids, self.weight = [0, 1], torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, **inputs: Any) -> Any:
            split = [value.chunk(2) if isinstance(value, torch.Tensor) else [value] * 2 for value in inputs.values()]
            parts = zip(*split, strict=False)
            return torch.stack([(self.weight * labels).sum() / items for labels, items in parts]).squeeze()

    model, settings = TwoGpus(), {"n_gpu": 2, "average_tokens_across_devices": False}
    trainer = stub_trainer(
        trainer_class,
        default_arguments(transformers.TrainingArguments, **settings),
        model=model,
        optimizer=None,
        compute_loss=lambda model, inputs, num_items_in_batch: model(**inputs, items=num_items_in_batch),
        compute_loss_context_manager=nullcontext,
        compute_loss_func=None,
        label_smoother=None,
        model_accepts_loss_kwargs=True,
        use_apex=False,
        state=SimpleNamespace(global_step=0),
        _prepare_inputs=lambda inputs: inputs,
    )
    backward = lambda loss, **kwargs: loss.backward()  # noqa: E731
    vars(trainer.accelerator).update(distributed_type="NO", backward=backward)
    device = ["cpu"] if "device" in inspect.signature(trainer.get_batch_samples).parameters else []
    (inputs,), items = trainer.get_batch_samples(iter([{"labels": torch.ones(2, 3)}]), 1, *device)
    trainer.training_step(model, inputs, items)
    return judge(float(model.weight.grad), right=1.0, wrong=0.5)
