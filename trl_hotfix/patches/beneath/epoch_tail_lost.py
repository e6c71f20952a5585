"""The last micro-batches of an epoch are lost, and steps with them, if they do not fill an optimizer step.

``Trainer`` asks ``get_batch_samples`` for the micro-batches of a step. For the last step of an epoch it asks for the
rows of the data set modulo ``gradient_accumulation_steps``, and not for the micro-batches modulo it: what it does not
ask for is not trained on, and what it gets is added to the next step. ``set_initial_training_values`` rounds the steps
of an epoch down, so a run of some epochs ends early. transformers 4.52 counts both right (pull requests 37777, 37923).

``get_batch_samples`` stops where the epoch ends, so it is asked for a whole step each time. transformers 4.46 to 4.49
count within the loop itself, where no method can be changed.
"""

from __future__ import annotations

import inspect
import math
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import class_with_steps, default_arguments, stub_trainer


@wrapper
def fetch_a_whole_step(call: Call) -> Any:
    """Ask for all micro-batches of a step. The last step of an epoch gets what is left."""
    of_a_step = call.trainer.args.gradient_accumulation_steps
    return call() if call["num_batches"] >= of_a_step else call.with_(num_batches=of_a_step)()


@wrapper
def count_the_last_step(call: Call) -> Any:
    """Count the last step of an epoch, if it has fewer micro-batches than others."""
    args = call["args"]
    epochs, steps_of_epoch, rows, samples, by_epochs, length, steps = call()
    if length is None or length % args.gradient_accumulation_steps == 0 or length < args.gradient_accumulation_steps:
        return epochs, steps_of_epoch, rows, samples, by_epochs, length, steps
    steps_of_epoch = math.ceil(length / args.gradient_accumulation_steps)
    if by_epochs:
        steps = math.ceil(args.num_train_epochs * steps_of_epoch)
    else:
        epochs = math.ceil(steps / steps_of_epoch)
    return epochs, steps_of_epoch, rows, samples, by_epochs, length, steps


def all_of_an_epoch_is_trained_on(module: ModuleType) -> Outcome:
    """Count the steps of an epoch of 30 micro-batches of two rows, eight a step, and fetch the last of them."""
    import transformers
    from packaging.version import Version

    trainer_class = class_with_steps(module)
    if trainer_class is None:
        return absent("this module has no trainer with the loop of transformers")
    if not Version("4.49") <= Version(transformers.__version__) < Version("4.52"):
        return absent("this transformers counts right, or within its loop")
    settings = {"gradient_accumulation_steps": 8, "num_train_epochs": 1.0, "max_steps": -1, "n_gpu": 0}
    args = default_arguments(transformers.TrainingArguments, average_tokens_across_devices=False, **settings)
    trainer = stub_trainer(trainer_class, args, model_accepts_loss_kwargs=False, compute_loss_func=None)

    class Loader(SimpleNamespace):
        def __len__(self) -> int:
            return 30

    steps = trainer.set_initial_training_values(args, Loader(dataset=range(60)), 16)[-1]
    left = iter([{"input_ids": None}] * 6)
    # 4.49 asks for no device.
    device = ["cpu"] if "device" in inspect.signature(transformers.Trainer.get_batch_samples).parameters else []
    fetched, _ = trainer.get_batch_samples(left, 60 % 8, *device)
    return judge(10 * steps + len(fetched), right=46, wrong=34)
