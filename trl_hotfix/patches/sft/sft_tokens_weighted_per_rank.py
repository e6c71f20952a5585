"""With several ranks SFT divides the loss of each by the tokens of that rank, and averages the gradients.

``Trainer`` of transformers counts the labels of the step on each rank, and has the model divide by this count. Only
with ``average_tokens_across_devices`` it sums the counts of all ranks, and multiplies the loss by the ranks, as
``DistributedDataParallel`` averages. TRL 0.19.0 turns that on (pull request 3538).

Here the setting stays off. transformers 4.46.0 and 4.46.1 do not have it. Up to 4.47.1 it ends in a ``TypeError`` where
an epoch ends with a whole step, up to 4.48.3 it multiplies the losses of evaluations too, and everywhere whatever else
is in the loss: a router's auxiliary loss, label smoothing, and the loss of a model that leaves the count alone.
Instead ``training_step`` is given the mean of the counts. Divided by it, the losses of the ranks have the mean that a
sum over all tokens, divided by all tokens, has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act_of_this_call, judge
from ...model import Outcome, Verdict
from ...testing import constructed, default_arguments, single_process, tiny_attention_model, tiny_tokenizer


def divide_by_the_mean_count(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the trainer, and have it train with the mean of the counts of all ranks."""
    wrapped(*args, **kwargs)
    # The configs of other self-tests have no such number.
    if getattr(instance.args, "world_size", 1) > 1 and _is_sft(instance):
        # A nested function could not be pickled with the trainer.
        instance.training_step = functools.partial(_training_step, instance, act_of_this_call())


def _training_step(
    trainer: Any, act: Callable[[], None], model: Any, inputs: Any, num_items_in_batch: Any = None
) -> Any:
    train: Callable[..., Any] = type(trainer).training_step
    summed = getattr(trainer.args, "average_tokens_across_devices", False)
    if num_items_in_batch is None or summed or not _takes_the_count(trainer):
        return train(trainer, model, inputs, num_items_in_batch)
    act()
    return train(trainer, model, inputs, _mean_of_ranks(trainer.accelerator, num_items_in_batch))


def _takes_the_count(trainer: Any) -> bool:
    """Return whether the model or the user's loss is given the count. transformers 4.48.1 to 4.51 counts always."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _mean_of_ranks(accelerator: Any, count: Any) -> Any:
    """Return the mean of the counts of all ranks: a tensor if ``count`` is one, and a number if not."""
    import torch

    counts = accelerator.gather(torch.as_tensor(count, device=accelerator.device))
    mean = counts.sum() / accelerator.num_processes
    return mean if isinstance(count, torch.Tensor) else mean.item()


def _is_sft(trainer: Any) -> bool:
    """Return whether this is SFT, or a class of the user's, and not a trainer of TRL with a loss of its own (GKD)."""
    of_trl = next(owner for owner in type(trainer).__mro__ if owner.__module__.partition(".")[0] == "trl")
    return of_trl.__name__ == "SFTTrainer"


def tokens_of_all_ranks_weigh_the_same(module: ModuleType) -> Outcome:
    """Compare losses and gradients of steps on several ranks with the formula, and check what is left alone."""
    from transformers import Trainer

    if "num_items_in_batch" not in inspect.signature(Trainer.training_step).parameters:
        return absent("this transformers divides by no count")
    if getattr(default_arguments(module.SFTConfig), "average_tokens_across_devices", False):
        return absent("average_tokens_across_devices is on by default")
    model = tiny_attention_model()
    outcome = _judged(module, model, _THREE_RANKS)
    of_user = _judged(module, model, _TWO_RANKS, child=("__main__", "TrainerOfTheUser"))
    if of_user.verdict is not outcome.verdict:
        raise AssertionError(f"a trainer of the user's has {of_user}, SFT's own {outcome}")
    if outcome.verdict is Verdict.FIXED:
        _judged(module, model, (_TWO_RANKS[0], _NOTHING_TO_LEARN))
    _check_what_is_handed_on(module, model, fixed=outcome.verdict is Verdict.FIXED)
    return outcome


_IGNORED = -100
_THREE_RANKS = (
    (((3, 4, 5, _IGNORED), (_IGNORED, 6)), ((9, 1), (2, 3, 4))),
    (((5,), (_IGNORED, 6)), ((7,), (8,))),
    (((2, 3, 4, 5, 6, 7, 8), (9, 1, 2)), ((3, _IGNORED, 5), (6,))),
)
_TWO_RANKS = (
    (((_IGNORED, 3), (4, 5)), ((6,), (_IGNORED, 7))),
    (((8, 9, 1, 2, 3, 4, _IGNORED), (5, 6, 7)), ((8, 9), (1,))),
)
"""Ranks in a step, of each two micro-batches of two rows, and of a row the labels after its first token."""

_NOTHING_TO_LEARN = (((_IGNORED, _IGNORED), (_IGNORED,)), ((_IGNORED,), (_IGNORED, _IGNORED)))


def _labels_of(rank: Any) -> int:
    return sum(label != _IGNORED for rows in rank for row in rows for label in row)


def _judged(module: ModuleType, model: Any, step: Any, child: tuple[str, str] | None = None) -> Outcome:
    """Judge the mean of the losses of the ranks in a step, and compare that of their gradients."""
    import torch

    counts = [_labels_of(rank) for rank in step]
    trained, of_all, of_ranks = [], [], []
    for number, rank in enumerate(step):
        case = _Case(module, model, counts, number, child=child)
        trained.append(case.trained(rank))
        total = case.summed(rank)
        of_all.append(total / sum(counts))
        of_ranks.append(total / max(counts[number], 1) / len(counts))
    mean, right, wrong = sum(trained) / len(counts), sum(of_all), sum(of_ranks)
    outcome = judge(float(mean[0]), right=float(right[0]), wrong=float(wrong[0]))
    expected = right if outcome.verdict is Verdict.FIXED else wrong
    if not torch.allclose(mean, expected, rtol=1e-4, atol=1e-6):
        raise AssertionError(f"the gradients are not those of the loss: they differ by {abs(mean - expected).max()}")
    return outcome


def _check_what_is_handed_on(module: ModuleType, model: Any, *, fixed: bool) -> None:
    """Check what becomes of a count of 2 where another rank has 6, and of none, and that one rank is left alone."""
    import torch

    tensor, old = torch.tensor(2, device="cpu"), _Case(module, model, [2, 6])
    del old.trainer.args.average_tokens_across_devices
    alone = {"one rank": _Case(module, model, [2]), "no number of ranks": _Case(module, model, [2], world_size=None)}
    users: dict[str, Any] = {"model_accepts_loss_kwargs": False, "compute_loss_func": len}
    runs: dict[str, tuple[_Case, Any, Any]] = {
        "GKD": (_Case(module, model, [2, 6], child=("trl.trainer.gkd_trainer", "GKDTrainer")), 2, 2),
        "a setting that sums the counts": (_Case(module, model, [2, 6], average_tokens_across_devices=True), 2, 2),
        "a loss that takes no count": (_Case(module, model, [2, 6], model_accepts_loss_kwargs=False), 2, 2),
        "no count": (_Case(module, model, [2, 6]), None, None),
    }
    if set_on := [name for name, case in alone.items() if "training_step" in vars(case.trainer)]:
        raise AssertionError(f"the trainer has a method of its own with {set_on}")
    if fixed:
        runs |= {
            "a number": (_Case(module, model, [2, 6]), 2, 4.0),
            "a tensor": (_Case(module, model, [2, 6]), tensor, tensor * 2.0),
            "a loss of the user's": (_Case(module, model, [2, 6], **users), 2, 4.0),
            "transformers 4.46.0, which has no such setting": (old, 2, 4.0),
        }
    for name, (case, count, expected) in runs.items():
        handed_on = case.handed_on(count)
        if (handed_on, type(handed_on)) != (expected, type(expected)):
            raise AssertionError(f"with {name} {handed_on!r} is handed on for {count!r}")


class _Case:
    """A trainer that SFT's constructor has made, on one of several ranks, which have these counts in a step.

    ``settings`` are arguments of the config or attributes of the trainer. ``child`` is the module and the
    name of a class that inherits SFT's.
    """

    def __init__(
        self,
        module: ModuleType,
        model: Any,
        counts: list[int],
        rank: int = 0,
        *,
        child: tuple[str, str] | None = None,
        **settings: Any,
    ) -> None:
        import torch

        trainer_class = module.SFTTrainer
        if child is not None:
            home, name = child
            trainer_class = type(name, (trainer_class,), {"__module__": home})
        defaults: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}, "dataset_text_field": "text"}
        defaults |= {"n_gpu": 1, "world_size": len(counts), "average_tokens_across_devices": False}
        args = default_arguments(module.SFTConfig, **{**defaults, **settings})
        if args.world_size is None:
            del args.world_size
        words = "processing_class" in inspect.signature(module.SFTTrainer.__init__).parameters
        self.model, self.counts = model, counts
        with single_process(module):
            self.trainer = constructed(
                trainer_class,
                model=self.model,
                args=args,
                train_dataset=_rows(),
                **{"processing_class" if words else "tokenizer": tiny_tokenizer()},
            )
        vars(self.trainer).update(_OF_TRAINER | settings)

        def gather(own: Any) -> Any:
            gathered = torch.tensor(counts)
            gathered[rank] = own
            return gathered

        self.trainer.accelerator = SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=len(counts),
            is_main_process=True,
            distributed_type="MULTI_CPU",
            gather=gather,
            gather_for_metrics=lambda own: own,
            unwrap_model=lambda model, **keywords: model,
            backward=lambda loss, **keywords: loss.backward(),
        )

    def handed_on(self, count: Any) -> Any:
        """Return the count that the method of the class is given. Those of the ranks must come from its own device."""
        import torch

        def gather(own: Any) -> Any:
            if own.device.type != "meta":
                raise AssertionError(f"a count is gathered from {own.device}, and not from the device of the rank")
            return torch.tensor(self.counts, device="cpu")

        self.trainer.accelerator.gather, self.trainer.accelerator.device = gather, torch.device("meta")
        type(self.trainer).training_step = lambda trainer, model, inputs, items: (model, inputs, items)
        *others, items = self.trainer.training_step("model", "inputs", count)
        if others != ["model", "inputs"]:
            raise AssertionError(f"model and inputs are {others}")
        return items

    def trained(self, rank: Any) -> Any:
        """Return the loss of a step of this rank, and after it the gradients."""
        import torch
        from transformers import Trainer

        with_device = "device" in inspect.signature(Trainer.get_batch_samples).parameters
        batches = map(_batch, rank)
        fetched, count = self.trainer.get_batch_samples(batches, len(rank), *(["cpu"] if with_device else []))
        self.model.zero_grad()
        loss = sum(self.trainer.training_step(self.model, batch, count) for batch in fetched)
        return torch.cat([loss[None], self._gradients()])

    def summed(self, rank: Any) -> Any:
        """Return the cross-entropy of all labels, summed, and after it the gradients."""
        import torch

        self.model.zero_grad()
        sums = []
        for batch in map(_batch, rank):
            labels = batch.pop("labels")
            logits = self.model(**batch).logits[:, :-1].flatten(0, 1)
            sums.append(torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum"))
        total = sum(sums)
        total.backward()
        return torch.cat([total.detach()[None], self._gradients()])

    def _gradients(self) -> Any:
        import torch

        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])


_OF_TRAINER = {
    "model_accepts_loss_kwargs": True,
    "compute_loss_func": None,
    "label_smoother": None,
    "optimizer": None,
    "use_apex": False,
    "use_cpu_amp": False,
    "state": SimpleNamespace(global_step=0),
    "control": SimpleNamespace(should_evaluate=False),
    "_prepare_inputs": dict,
    "compute_loss_context_manager": nullcontext,
}
"""What the constructor of transformers would set."""


@functools.cache
def _rows() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"input_ids": [5, 6, 7]}])


def _batch(rows: Any) -> dict[str, Any]:
    """Return a micro-batch of rows that are padded to the same length. The first token of each predicts the second."""
    import torch

    longest = max(map(len, rows))
    labels = torch.tensor([[_IGNORED, *row, *[_IGNORED] * (longest - len(row))] for row in rows])
    ids = (torch.arange(labels.numel()) * 5 % 16).reshape(labels.shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
