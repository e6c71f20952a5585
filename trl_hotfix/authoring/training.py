"""What a trainer does around its loss: micro-batches, ranks, the preparation of a dataset, the router's loss."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..by_identity import ByIdentity
from ..call import act


def micro_batches(trainer: Any) -> int:
    """Return how many micro-batches the current optimizer step accumulates.

    Later transformers releases count them, since the last step of an epoch may have fewer than
    ``gradient_accumulation_steps``; earlier ones divide by that number in the last step too.
    """
    counted: int | None = getattr(trainer, "current_gradient_accumulation_steps", None)
    return counted or int(trainer.args.gradient_accumulation_steps)


def nobody_divides(trainer: Any) -> bool:
    """Return whether nobody divides the loss of a trainer that accumulates and computes it itself.

    transformers asks ``model_accepts_loss_kwargs`` after the call: True says that the loss is divided already.
    """
    accumulates = getattr(trainer, "model_accepts_loss_kwargs", False) and trainer.args.gradient_accumulation_steps > 1
    return bool(accumulates) and not (trainer.is_deepspeed_enabled and deepspeed_divides())


def deepspeed_divides() -> bool:
    """Return whether the engine of DeepSpeed divides by the micro-batches: before transformers 4.49 (PR 35808)."""
    from transformers import Trainer

    return "scale_wrt_gas" not in inspect.unwrap(Trainer.training_step).__code__.co_consts


def deepspeed_engine(trainer: Any) -> Any:
    """Return the engine of DeepSpeed with which accelerate goes backward, or None."""
    return getattr(getattr(trainer.accelerator, "deepspeed_engine_wrapped", None), "engine", None)


_plain_models: ByIdentity[weakref.ref[Any]] = ByIdentity()


def plain_model(trainer: Any, model: Any) -> Any:
    """Return ``model`` without what wraps it in training (DDP, a DeepSpeed engine, ``torch.compile``).

    accelerate looks at every submodule for that, so it is asked once for each model.
    """
    known = _plain_models.get(model)
    plain = known() if known else None
    if plain is None:
        plain = trainer.accelerator.unwrap_model(model)
        _plain_models[model] = weakref.ref(plain)
    return plain


def copies_of_the_loss(trainer: Any) -> int:
    """Return by how much ``Trainer.compute_loss`` multiplies a loss that is divided by the items of all ranks.

    The gradient is the mean over the ranks, and so becomes the sum. The factor is 1 on one device, and where each rank
    counts its own items (``average_tokens_across_devices=False``).
    """
    from transformers import Trainer

    if not getattr(trainer.args, "average_tokens_across_devices", False):
        return 1
    # Which of these attributes the factor depends on differs between transformers releases.
    names = inspect.unwrap(Trainer.compute_loss).__code__.co_names
    if "n_gpu" in names and trainer.args.n_gpu > 1:
        return int(trainer.args.n_gpu)
    return int(trainer.accelerator.num_processes // (trainer.get_tp_size() if "get_tp_size" in names else 1))


def copies_of_a_loss_of_all_gpus(trainer: Any) -> int:
    """Return ``copies_of_the_loss`` of a trainer that computes its loss from the outputs of the whole batch.

    Several GPUs in one process share one batch, and their loss is computed once.
    """
    return 1 if trainer.args.n_gpu > 1 else copies_of_the_loss(trainer)


class GeneratedLabels:
    """The labels that were generated last: they distinguish a generated batch from one of the dataset.

    One object is for all trainers of a process, since a static method has no trainer to store them on. They are
    compared by value: ``Trainer`` may copy them on their way.
    """

    def __init__(self) -> None:
        self._labels: Any = None

    def note(self, labels: Any) -> None:
        """Keep the labels. The wrapper that does this acts."""
        self._labels = labels
        act()

    def are(self, labels: Any) -> bool:
        """Return whether these labels are those that were generated last."""
        import torch

        return self._labels is not None and torch.equal(self._labels.to(labels.device), labels)

    def forget(self) -> None:
        self._labels = None


def prepared_first(module: ModuleType, dataset: Any, function: Callable[..., Any], settings: Any, doing: str) -> Any:
    """Return ``dataset.map(function)``, called as this module's ``_prepare_dataset`` would call it, and before it.

    The main process goes first, so that the others find the result in the cache: every rank must call this, unless the
    dataset is a stream. ``settings`` is the trainer's config, and ``doing`` the progress bar's name. ``function``
    should be a nested one: ``datasets`` knows a function of a module by its name, and would take what an older release
    of the patch has cached.
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):  # mapped when it is read
        return dataset.map(function)
    # From 0.19 to 1.0.0rc1 the dataset is read through this function, instead of a transform of its own.
    if hasattr(module, "remove_none_values"):
        dataset = dataset.with_transform(module.remove_none_values)
    main_first = getattr(module, "global_then_local_main_first", None) or module.PartialState().main_process_first
    with main_first():
        return dataset.map(function, num_proc=settings.dataset_num_proc, desc=doing)
