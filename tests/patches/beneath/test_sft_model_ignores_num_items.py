"""A micro-batch has its share of a step, if the model gives a mean; what a model divides itself stays as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments
from trl.trainer.sft_trainer import SFTTrainer

from trl_hotfix.call import Call
from trl_hotfix.patches.beneath.sft_model_ignores_num_items import divide_by_the_items
from trl_hotfix.testing import default_arguments, stub_trainer
from trl_hotfix.witness import Count

ITEMS = 12


class Outputs(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


def batch(*lengths: int) -> dict[str, Any]:
    """Return rows of eight labels, of which so many are predicted."""
    generator = torch.Generator().manual_seed(sum(lengths))
    labels = torch.randint(1, 11, (len(lengths), 8), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, 1 + length :] = -100
    return {"input_ids": labels.clamp(min=0), "labels": labels}


class Model:
    """A model of a table of logits. ``divides``: it divides by the number of items, and gives a mean otherwise."""

    def __init__(self, divides: bool, **left: Any) -> None:
        torch.manual_seed(0)
        self.weight, self.divides, self.left = torch.nn.Parameter(torch.randn(8, 11)), divides, left
        self.asked_for_outputs: list[bool] = []

    def __call__(self, inputs: dict[str, Any], items: Any) -> tuple[Any, Outputs]:
        logits = self.weight.expand(len(inputs["labels"]), -1, -1)
        total = cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")
        loss = total / (items if self.divides else (inputs["labels"][:, 1:] != -100).sum())
        return loss, Outputs({"logits": logits, "loss": loss, **self.left})

    def total(self, inputs: dict[str, Any]) -> float:
        return float(cross_entropy(self.logits(inputs), inputs["labels"][:, 1:].flatten(), reduction="sum"))

    def logits(self, inputs: dict[str, Any]) -> Any:
        return self.weight.expand(len(inputs["labels"]), -1, -1)[:, :-1].flatten(0, 1)


def trainer_of(*, steps: int = 4, training: bool = True, **attributes: Any) -> Any:
    defaults = {
        "model": SimpleNamespace(training=training),
        "label_smoother": None,
        "compute_loss_func": None,
        "model_accepts_loss_kwargs": True,
        "current_gradient_accumulation_steps": steps,
        "get_tp_size": lambda: 1,
    }
    arguments = default_arguments(TrainingArguments, n_gpu=1, average_tokens_across_devices=True)
    return stub_trainer(SFTTrainer, arguments, **{**defaults, **attributes})


def loss_of(model: Any, trainer: Any, inputs: Any, items: Any = ITEMS, **options: Any) -> tuple[Any, int]:
    """Return what ``compute_loss`` returns with the wrapper, and whether it acted."""

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> tuple[Any, Outputs] | Any:
        loss, outputs = model(inputs, num_items_in_batch)
        if isinstance(model, Model):
            model.asked_for_outputs.append(return_outputs)
        loss = loss * trainer.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    call, count = Call(compute_loss, trainer, (model, inputs), {"num_items_in_batch": items, **options}), Count()
    result = divide_by_the_items(call)
    call.end(count, result)
    return result, count.acted


@pytest.mark.parametrize("items", [ITEMS, torch.tensor(ITEMS)], ids=["a number", "a tensor"])
def test_each_micro_batch_of_a_step_has_its_share(items: Any) -> None:
    model, trainer = Model(divides=False), trainer_of()
    for lengths in ((1, 2), (4, 1), (2, 2)):
        inputs = batch(*lengths)
        loss, acted = loss_of(model, trainer, inputs, items)
        assert float(loss) == pytest.approx(model.total(inputs) / ITEMS)
        assert acted == 1


def test_gradients_are_those_of_a_model_that_divides() -> None:
    of_both = []
    for divides in (False, True):
        model, trainer = Model(divides), trainer_of()
        for lengths in ((1, 2), (4, 1), (2, 2)):
            loss_of(model, trainer, batch(*lengths))[0].backward()
        of_both.append(model.weight.grad)
    torch.testing.assert_close(*of_both)


@pytest.mark.parametrize("first", [(1, 2), (4, 2), (6,)])
def test_a_model_that_divides_is_asked_once_and_left_alone(first: tuple[int, ...]) -> None:
    model, trainer = Model(divides=True), trainer_of()
    for lengths in (first, (4, 1)):
        inputs = batch(*lengths)
        loss, acted = loss_of(model, trainer, inputs)
        assert float(loss) == pytest.approx(model.total(inputs) / ITEMS)
        assert acted == 0
    assert model.asked_for_outputs == [True, False]


def test_once_known_a_model_needs_no_logits_to_be_given_its_share() -> None:
    trainer = trainer_of()
    loss_of(Model(divides=False), trainer, batch(1, 2))
    model, inputs = Model(divides=False, logits=None), batch(2, 2)
    loss, acted = loss_of(model, trainer, inputs)
    assert float(loss) == pytest.approx(model.total(inputs) / ITEMS)
    assert acted == 1


def test_each_trainer_is_asked_about_its_own_model() -> None:
    trainers = {True: trainer_of(), False: trainer_of()}
    for _ in range(2):
        for divides, trainer in trainers.items():
            model, inputs = Model(divides), batch(2, 1)
            loss, acted = loss_of(model, trainer, inputs)
            assert float(loss) == pytest.approx(model.total(inputs) / ITEMS)
            assert acted == (not divides)


@pytest.mark.parametrize("sure", [False, True])
def test_a_micro_batch_that_tells_nothing_is_not_the_answer(sure: bool) -> None:
    trainer, inputs, model = trainer_of(), batch(6, 6), Model(divides=True)
    if sure:
        inputs = batch(7)
        model.weight.data = 4.0 * torch.nn.functional.one_hot(inputs["labels"][0].roll(-1), 11).float()
    # The other micro-batches of this step have no labels, so both numbers are one.
    loss_of(model, trainer, inputs, 7 if sure else ITEMS)
    loss, acted = loss_of(Model(divides=False), trainer, batch(1, 2))
    assert acted == 1
    assert float(loss) == pytest.approx(Model(divides=False).total(batch(1, 2)) / ITEMS)


def test_the_outputs_are_returned_if_they_are_asked_for() -> None:
    model, inputs = Model(divides=False), batch(1, 2)
    (loss, outputs), _ = loss_of(model, trainer_of(), inputs, return_outputs=True)
    assert float(loss) == pytest.approx(model.total(inputs) / ITEMS)
    assert outputs.logits.shape == (2, 8, 11)


def test_on_two_ranks_the_loss_is_multiplied_as_before() -> None:
    model, inputs, trainer = Model(divides=False), batch(1, 2), trainer_of(steps=1)
    trainer.accelerator.num_processes = 2
    loss, acted = loss_of(model, trainer, inputs)
    assert float(loss) == pytest.approx(2 * model.total(inputs) / ITEMS)
    assert acted == 1


@pytest.mark.parametrize("divides", [True, False])
def test_on_two_ranks_with_two_micro_batches_each(divides: bool) -> None:
    model, inputs, trainer = Model(divides), batch(1, 2), trainer_of(steps=2)
    trainer.accelerator.num_processes = 2
    loss, acted = loss_of(model, trainer, inputs)
    assert float(loss) == pytest.approx(2 * model.total(inputs) / ITEMS)
    assert acted == (not divides)


@pytest.mark.parametrize(
    ("settings", "items"),
    [
        ({"steps": 1}, ITEMS),
        ({"training": False}, ITEMS),
        ({}, None),
        ({"model_accepts_loss_kwargs": False}, ITEMS),
        ({"compute_loss_func": sum}, ITEMS),
        ({"label_smoother": sum}, ITEMS),
    ],
    ids=["one micro-batch", "evaluation", "no items", "transformers divides", "user's function", "smoothing"],
)
def test_a_loss_that_is_not_divided_by_the_model_is_left_alone(settings: dict[str, Any], items: Any) -> None:
    model, inputs = Model(divides=False), batch(1, 2)
    loss, acted = loss_of(model, trainer_of(**settings), inputs, items)
    assert float(loss) == pytest.approx(model.total(inputs) / 3)
    assert acted == 0


@pytest.mark.parametrize(
    ("left", "more"),
    [
        ({"logits": None}, {}),
        ({"aux_loss": torch.tensor(2.0)}, {}),
        ({"logits": torch.zeros(2, 9, 11)}, {}),
        ({}, {"shift_labels": torch.zeros(2, 8)}),
    ],
    ids=["no logits", "router loss", "virtual tokens", "shifted labels"],
)
def test_what_cannot_be_compared_is_left_alone(left: dict[str, Any], more: dict[str, Any]) -> None:
    model, inputs = Model(divides=False, **left), batch(1, 2)
    loss, acted = loss_of(model, trainer_of(), {**inputs, **more})
    assert float(loss) == pytest.approx(model.total(inputs) / 3)
    assert acted == 0


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (torch.tensor([1.0, 2.0]), Outputs(logits=torch.zeros(2, 8, 11))),
        (torch.tensor([1.0]), (torch.zeros(2, 8, 11),)),
    ],
    ids=["a loss for each GPU", "a tuple"],
)
def test_other_outputs_are_left_alone(loss: Any, outputs: Any) -> None:
    found, acted = loss_of(lambda inputs, items: (loss, outputs), trainer_of(), batch(1, 2))
    assert found.equal(loss)
    assert acted == 0


def test_a_batch_without_labels_is_left_alone() -> None:
    def compute(inputs: Any, items: Any) -> tuple[Any, Outputs]:
        return torch.tensor(5.0), Outputs(logits=torch.zeros(2, 8, 11))

    loss, acted = loss_of(compute, trainer_of(), {"input_ids": torch.ones(2, 8)})
    assert float(loss) == 5
    assert acted == 0
