"""Each token of a step has the same weight in the smoothed loss, and nothing else is weighed anew."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother
from trl.trainer import sft_trainer

from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

ID, TARGET = "sft-label-smoothing-times-gas", "trl.trainer.sft_trainer:SFTTrainer.compute_loss"

EPSILON = 0.2
TWO_ROWS = [[-100, 3, 4, 5, -100], [6, 7, -100, 9, -100]]
ONE_ROW = [[3, 4, 5, 6]]
NO_TOKEN = [[-100, -100], [5, -100]]
"""The labels of micro-batches. Five, three and none of them are predicted, as those of first tokens are not."""

SHIFTS = "label_smoother" in inspect.unwrap(sft_trainer.SFTTrainer.compute_loss).__code__.co_names
"""Whether TRL shifts the labels itself, from 1.15.0 on. Before, transformers shifts those of its own models."""

each_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


class Parts(dict):  # type: ignore[type-arg]
    """Outputs, and metrics: ``[mode][name].append`` and, before 0.18.0, ``[name].append``."""

    __getattr__ = dict.__getitem__

    def __missing__(self, name: str) -> Any:
        return Parts()

    def append(self, value: float) -> None: ...


class LlamaForCausalLM(torch.nn.Module):
    """A language model of one matrix that transformers takes for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.sin(torch.arange(121.0)).reshape(11, 11))

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        logits = self.weight[input_ids]
        # From 1.15.0 on TRL takes its metrics from its own head, and with loss_type="dft" its loss.
        parts = dict.fromkeys(("label_mask", "entropy", "is_top1", "log_probs"), logits[:, 1:, 0])
        return Parts(logits=logits, **parts)


class UnknownModel(LlamaForCausalLM):
    """A model of a user's."""


def trainer_of(model: Any = None, *, ranks: int = 1, summed: bool = True, **attributes: Any) -> Any:
    defaults: dict[str, Any] = {
        "model": model or LlamaForCausalLM(),
        "label_smoother": LabelSmoother(epsilon=EPSILON),
        "compute_loss_func": None,
        "model_accepts_loss_kwargs": True,
        "aux_loss_enabled": False,
        "num_virtual_tokens": 0,
        "control": SimpleNamespace(should_evaluate=False),
        "get_tp_size": lambda: 1,
        "_metrics": Parts(),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    args = default_arguments(sft_trainer.SFTConfig, n_gpu=1, average_tokens_across_devices=summed, loss_type="nll")
    trainer = stub_trainer(sft_trainer.SFTTrainer, args, **{**defaults, **attributes})
    vars(trainer.accelerator).update(parallelism_config=None, num_processes=ranks)
    return trainer


def batch_of(labels: list[list[int]]) -> dict[str, Any]:
    targets = torch.tensor(labels)
    ids = (torch.arange(targets.numel()) * 3 % 11).reshape(targets.shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": targets}


def loss_of(trainer: Any, labels: list[list[int]], items: Any = 9) -> Any:
    return trainer.compute_loss(trainer.model, batch_of(labels), num_items_in_batch=items)


def total_of(model: Any, labels: list[list[int]], *, shifts: bool = True) -> Any:
    """Return the smoothed losses of all tokens, summed: a part of the cross-entropy with all of the vocabulary."""
    batch = batch_of(labels)
    return smoothed_sum(model.weight[batch["input_ids"]], batch["labels"], shifts=shifts)


def smoothed_sum(logits: Any, labels: Any, *, shifts: bool = True) -> Any:
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = -logits.log_softmax(-1)
    of_labels = losses.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    smoothed = (1 - EPSILON) * of_labels + EPSILON * losses.mean(-1)
    return (smoothed * (labels != -100)).sum()


def assert_same(loss: Any, expected: Any, model: Any) -> None:
    """Compare two losses, and their gradients."""
    torch.testing.assert_close(loss, expected)
    one, other = (torch.autograd.grad(value, model.weight)[0] for value in (loss, expected))
    torch.testing.assert_close(one, other)


@each_mode
@pytest.mark.parametrize("items", [9, torch.tensor(9)], ids=["number", "tensor"])
def test_each_micro_batch_of_each_trainer_has_the_weight_of_its_tokens(items: Any, training: bool) -> None:
    for trainer in (trainer_of(), trainer_of()):
        model = trainer.model.train(training)
        for labels in (TWO_ROWS, ONE_ROW, TWO_ROWS):
            assert_same(loss_of(trainer, labels, items), total_of(model, labels) / 9, model)


def test_the_micro_batches_of_a_step_add_up_to_its_mean() -> None:
    trainer = trainer_of()
    loss = loss_of(trainer, TWO_ROWS, 8) + loss_of(trainer, ONE_ROW, 8)
    mean = (total_of(trainer.model, TWO_ROWS) + total_of(trainer.model, ONE_ROW)) / 8
    assert_same(loss, mean, trainer.model)


@pytest.mark.parametrize(("summed", "copies"), [(True, 4), (False, 1)], ids=["all ranks counted", "own count"])
def test_a_loss_is_multiplied_by_the_ranks_where_all_are_counted(summed: bool, copies: int) -> None:
    trainer = trainer_of(ranks=4, summed=summed)
    assert_same(loss_of(trainer, TWO_ROWS), total_of(trainer.model, TWO_ROWS) * copies / 9, trainer.model)


def test_arguments_may_be_given_by_position() -> None:
    trainer = trainer_of()
    batch = batch_of(ONE_ROW)
    loss, outputs = trainer.compute_loss(trainer.model, batch, True, 9)
    assert outputs["logits"].equal(trainer.model.weight[batch["input_ids"]])
    assert_same(loss, total_of(trainer.model, ONE_ROW) / 9, trainer.model)


def test_labels_that_transformers_does_not_shift_are_all_counted() -> None:
    trainer = trainer_of(UnknownModel())
    assert_same(loss_of(trainer, ONE_ROW), total_of(trainer.model, ONE_ROW, shifts=SHIFTS) / 9, trainer.model)


def test_a_micro_batch_without_a_token_has_the_loss_0() -> None:
    trainer = trainer_of()
    loss = loss_of(trainer, NO_TOKEN)
    (gradient,) = torch.autograd.grad(loss, trainer.model.weight)
    assert float(loss) == 0
    assert not gradient.any()


@pytest.mark.parametrize("fails", [False, True], ids=["returned", "raised"])
def test_the_trainer_keeps_its_label_smoother(fails: bool) -> None:
    trainer = trainer_of()
    smoother = trainer.label_smoother
    if fails:
        trainer.model.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(trainer, ONE_ROW)
    else:
        loss_of(trainer, ONE_ROW)
    assert trainer.label_smoother is smoother


def loss_of_the_user(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return 3 * smoothed_sum(outputs["logits"], labels)


ELSEWHERE: dict[str, tuple[dict[str, Any], dict[str, Any], Any, float]] = {
    "no count": ({}, {}, None, 1 / 5),
    "several GPUs": ({}, {"n_gpu": 2}, 9, 1 / 5),
    "a model that takes no count": ({"model_accepts_loss_kwargs": False}, {}, 9, 1 / 5),
    "a loss of the user": ({"compute_loss_func": loss_of_the_user}, {}, 9, 3),
}


@pytest.mark.parametrize(("attributes", "settings", "items", "weight"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_loss_that_is_divided_otherwise_stays(
    attributes: dict[str, Any], settings: dict[str, Any], items: Any, weight: float
) -> None:
    trainer = trainer_of(summed=False, **attributes)
    vars(trainer.args).update(settings)
    assert_same(loss_of(trainer, TWO_ROWS, items), total_of(trainer.model, TWO_ROWS) * weight, trainer.model)
    assert tiny.acts(ID, TARGET, trainer) == 0


@pytest.mark.parametrize("change", [{"label_smoother": None}, {"loss_type": "dft"}], ids=["no smoothing", "dft"])
def test_a_run_whose_loss_is_not_smoothed_stays(change: dict[str, Any], switch: Any) -> None:
    if not SHIFTS:
        pytest.skip("in this release the loss without smoothing is the model's own")
    trainer = trainer_of(**{name: value for name, value in change.items() if name == "label_smoother"})
    vars(trainer.args).update(change)
    loss = loss_of(trainer, TWO_ROWS)
    assert tiny.acts(ID, TARGET, trainer) == 0
    with switch.off():
        assert loss.equal(loss_of(trainer, TWO_ROWS))


@each_mode
def test_trl_divides_by_the_tokens_of_the_micro_batch(training: bool, switch: Any) -> None:
    trainer = trainer_of(ranks=4)
    model = trainer.model.train(training)
    with switch.off():
        for labels, tokens in ((TWO_ROWS, 5), (ONE_ROW, 3)):
            assert_same(loss_of(trainer, labels), total_of(model, labels) * 4 / tokens, model)
        assert loss_of(trainer, NO_TOKEN).isnan()
