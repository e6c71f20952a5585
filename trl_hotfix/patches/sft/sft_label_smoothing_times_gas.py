"""With label smoothing SFT accumulates means over micro-batches as if they were divided by the tokens of the step.

``LabelSmoother`` of transformers divides by the tokens of the micro-batch. ``Trainer.compute_loss``, which SFT calls up
to 1.14.2, and SFT's own ``compute_loss`` from 1.15.0 on are given ``num_items_in_batch``. So ``Trainer`` does not
divide the loss by the micro-batches of the step, and multiplies it by the ranks, as belongs to that count. From
transformers 5.15.0 on ``LabelSmoother`` takes the count, and TRL 1.15.0 passes it there.

The wrapper gives the trainer a label smoother that has the weight of its tokens among those of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import default_arguments, stub_trainer


def weigh_by_tokens(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Divide the sum over the tokens of the micro-batch by the count of the step."""
    items = argument(wrapped, args, kwargs, "num_items_in_batch")
    smoother = instance.label_smoother
    if (
        items is None
        or smoother is None
        or not instance.model_accepts_loss_kwargs  # Trainer divides by the micro-batches.
        or instance.compute_loss_func is not None
        or getattr(instance.args, "loss_type", "nll") != "nll"
        or instance.args.n_gpu > 1
    ):
        return wrapped(*args, **kwargs)

    def smoothed(outputs: Any, labels: Any, shift_labels: bool = False) -> Any:
        tokens = (labels[..., 1:] if shift_labels else labels).ne(smoother.ignore_index).sum()
        if not tokens:  # Its mean is 0 / 0.
            return outputs["logits"].sum() * 0.0
        return smoother(outputs, labels, shift_labels=shift_labels) * tokens / items

    with shadowed(instance, "label_smoother", smoothed):
        return wrapped(*args, **kwargs)


def smoothed_loss_is_divided_by_the_count(module: ModuleType) -> Outcome:
    """Compare losses and gradients of micro-batches with the formula, on one rank and on four.

    Other calls are those of a loss without a count, of the user's own loss, of a trainer without label smoothing.
    """
    import torch
    from transformers import Trainer
    from transformers.trainer_pt_utils import LabelSmoother

    if "num_items_in_batch" not in inspect.signature(Trainer.compute_loss).parameters:
        return absent("this transformers divides by the micro-batches")
    if "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters:
        return absent("this transformers divides the smoothed loss by the count")
    if "compute_loss" not in vars(module.SFTTrainer):
        return absent("SFT has no loss of its own")
    case = _Case(module)
    outcomes = [
        case.judged(_TWO_ROWS, 9, right=1 / 9, wrong=1 / 5),
        case.judged(_ONE_ROW, torch.tensor(9), right=1 / 9, wrong=1 / 3),
        case.judged(_TWO_ROWS, 9, right=4 / 9, wrong=4 / 5, ranks=4),
        case.judged(_TWO_ROWS, 9, right=1 / 9, wrong=1 / 5, ranks=4, average_tokens_across_devices=False),
        case.judged(_ONE_ROW, 9, right=1 / 9, wrong=1 / 3, positional=True),
    ]
    case.model.eval()
    outcomes.append(case.judged(_TWO_ROWS, 9, right=1 / 9, wrong=1 / 5))
    # Up to 1.14.2 transformers does not shift the labels of a model that is none of its own.
    shifts = "label_smoother" in inspect.unwrap(module.SFTTrainer.compute_loss).__code__.co_names
    case.model.__class__ = type("Unknown", (type(case.model),), {})
    outcomes.append(case.judged(_ONE_ROW, 9, right=1 / 9, wrong=1 / (3 if shifts else 4), shifts=shifts))
    case.model.__class__ = type(case.model).__bases__[0]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the micro-batches do not agree: {outcomes}")
    _check_untouched(case)
    if outcomes[0].verdict is Verdict.FIXED:
        case.judged((_IGNORED, _IGNORED), 9, right=0)
    return outcomes[0]


_IGNORED = -100
_TWO_ROWS = (-100, 3, 4, 5, -100), (6, 7, -100, 9, -100)
_ONE_ROW = ((3, 4, 5, 6),)
"""The labels of micro-batches. Five and three of them are predicted, as those of the first tokens are not."""


def _check_untouched(case: _Case) -> None:
    """Check calls without a count, of models that transformers gives none, of a user's loss, and of several GPUs."""
    alone = {"average_tokens_across_devices": False}
    case.judged(_TWO_ROWS, None, right=1 / 5)
    case.judged(_TWO_ROWS, 9, right=1 / 5, n_gpu=2, **alone)
    with shadowed(case.trainer, "model_accepts_loss_kwargs", False):
        case.judged(_TWO_ROWS, 9, right=1 / 5, **alone)
    with shadowed(
        case.trainer, "compute_loss_func", lambda outputs, labels, **kwargs: 3 * _sum(outputs.logits, labels)
    ):
        case.judged(_TWO_ROWS, 9, right=3, **alone)


class _Case:
    """A trainer with label smoothing, and a language model of one matrix that transformers takes for a Llama."""

    def __init__(self, module: ModuleType) -> None:
        import torch
        from transformers.trainer_pt_utils import LabelSmoother

        class Log(dict):  # type: ignore[type-arg]
            """``[mode][name].append`` and, before 0.18.0, ``[name].append``."""

            def __missing__(self, key: str) -> Any:
                return Log()

            def append(self, value: float) -> None:
                pass

        class Outputs(dict):  # type: ignore[type-arg]
            __getattr__ = dict.__getitem__

        class LlamaForCausalLM(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                index = torch.arange(121, dtype=torch.float32)
                self.weight = torch.nn.Parameter(torch.sin(index).reshape(11, 11))

            def forward(self, input_ids: Any, **kwargs: Any) -> Any:
                logits = self.weight[input_ids]
                shape = logits[:, 1:, 0].shape
                return Outputs(
                    logits=logits,
                    # From 1.15.0 on TRL takes its metrics from its own head.
                    label_mask=torch.ones(shape, dtype=torch.bool),
                    entropy=torch.zeros(shape),
                    is_top1=torch.zeros(shape, dtype=torch.bool),
                )

        self.model = LlamaForCausalLM()
        self.smoother = LabelSmoother(epsilon=_EPSILON)
        self.trainer = stub_trainer(
            module.SFTTrainer,
            default_arguments(module.SFTConfig, n_gpu=1, average_tokens_across_devices=True, loss_type="nll"),
            model=self.model,
            label_smoother=self.smoother,
            compute_loss_func=None,
            model_accepts_loss_kwargs=True,
            aux_loss_enabled=False,
            current_gradient_accumulation_steps=1,
            num_virtual_tokens=0,
            control=SimpleNamespace(should_evaluate=False),
            get_tp_size=lambda: 1,
            _metrics=Log(),
            _total_train_tokens=0,
            _tp_size=1,
        )
        self.trainer.accelerator.parallelism_config = None

    def judged(
        self,
        labels: Any,
        items: Any,
        *,
        right: float,
        wrong: float = -1.0,
        ranks: int = 1,
        positional: bool = False,
        shifts: bool = True,
        **settings: Any,
    ) -> Outcome:
        """Judge loss and gradient by the smoothed losses of all tokens, summed, times ``right`` or ``wrong``.

        ``settings`` are arguments of the trainer in this call.
        """
        import torch

        targets = torch.tensor(labels).reshape(-1, len(labels[0]) if isinstance(labels[0], tuple) else 2)
        ids = (torch.arange(targets.numel()) * 3 % 11).reshape(targets.shape)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": targets}
        self.trainer.accelerator.num_processes = ranks
        before = vars(self.trainer.args).copy()
        vars(self.trainer.args).update(settings)
        if positional:
            loss, outputs = self.trainer.compute_loss(self.model, inputs, True, items)
            if not torch.equal(outputs["logits"], self.model.weight[ids]):
                raise AssertionError(f"the outputs are {outputs}")
        else:
            loss = self.trainer.compute_loss(self.model, inputs, num_items_in_batch=items)
        vars(self.trainer.args).update(before, n_gpu=1)
        if self.trainer.label_smoother is not self.smoother:
            raise AssertionError("the trainer has another label smoother after the call")
        total = _sum(self.model.weight[ids], targets, shifts=shifts)
        by = {"right": float(total.detach()) * right, "wrong": float(total.detach()) * wrong}
        outcome = judge(float(loss.detach()), **by)
        gradient, expected = (torch.autograd.grad(value, self.model.weight)[0] for value in (loss, total))
        expected = expected * (right if outcome.verdict is Verdict.FIXED else wrong)
        if not torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6):
            raise AssertionError(f"the gradient is not that of the loss: {gradient}, expected {expected}")
        return outcome


_EPSILON = 0.2


def _sum(logits: Any, labels: Any, *, shifts: bool = True) -> Any:
    """Return the smoothed losses of all tokens, summed: a part of the cross-entropy with all of the vocabulary."""
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = -logits.log_softmax(-1)
    of_labels = losses.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    smoothed = (1 - _EPSILON) * of_labels + _EPSILON * losses.mean(-1)
    return (smoothed * (labels != -100)).sum()
