"""Each GPU divides by its share of the items, and the mean over the GPUs is the loss of all rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.call import Call
from trl_hotfix.patches.beneath.dataparallel_divides_by_gpus import share_the_items
from trl_hotfix.witness import Count

from tiny.gpus import TwoGpus

ITEMS = 12


class Model(torch.nn.Module):
    """Returns the sum of the labels, times a weight of 1, divided by the items."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, input_ids: Any, labels: Any, num_items_in_batch: Any) -> dict[str, Any]:
        return {"loss": (self.weight * labels).sum() / num_items_in_batch}


def batch(*values: float) -> dict[str, Any]:
    """Return a row for each value, which is its only label."""
    return {"input_ids": torch.zeros(len(values), 1), "labels": torch.tensor(values)[:, None]}


def step(model: Any, inputs: dict[str, Any], items: Any, **attributes: Any) -> tuple[float, int]:
    """Run one micro-batch with the wrapper, and return the gradient, and whether it acted."""
    inner = model.module if isinstance(model, torch.nn.DataParallel) else model
    trainer = SimpleNamespace(**{"compute_loss_func": None, "label_smoother": None, **attributes})

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs, num_items_in_batch=num_items_in_batch)["loss"].mean()
        loss.backward()
        return loss.detach()

    inner.weight.grad = None
    call, count = Call(training_step, trainer, (model, inputs, items)), Count()
    result = share_the_items(call)
    call.end(count, result)
    assert float(result) == pytest.approx(float(inner.weight.grad))
    return float(inner.weight.grad), count.acted


@pytest.fixture(params=[ITEMS, torch.tensor([ITEMS])], ids=["a number", "a tensor"])
def items(request: pytest.FixtureRequest) -> Any:
    """What transformers counts up to 4.49, and from 4.51 on."""
    return request.param


@pytest.mark.parametrize("values", [(1, 5), (1, 2, 3, 6), (1, 2, 6)], ids=["a row each", "two each", "two and one"])
def test_two_gpus_have_the_gradient_of_one(items: Any, values: tuple[float, ...]) -> None:
    assert step(TwoGpus(Model()), batch(*values), items) == (pytest.approx(sum(values) / ITEMS), 1)


def test_one_row_is_that_of_one_gpu(items: Any) -> None:
    model = TwoGpus(Model())
    assert step(model, batch(6), items) == (pytest.approx(6 / ITEMS), 0)
    assert model.rows == [[1]]


def test_four_gpus_share_three_rows(items: Any) -> None:
    model = TwoGpus(Model())
    model.device_ids = [0, 1, 2, 3]
    assert step(model, batch(1, 2, 3), items) == (pytest.approx(6 / ITEMS), 1)
    assert model.rows == [[1, 1, 1]]


def test_the_device_of_the_items_does_not_matter() -> None:
    """A tensor would have to be split, and be on each GPU."""
    handed_over: list[Any] = []
    trainer = SimpleNamespace(compute_loss_func=None, label_smoother=None)

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        handed_over.append(num_items_in_batch)

    share_the_items(Call(training_step, trainer, (TwoGpus(Model()), batch(1, 2), torch.tensor([ITEMS]))))
    assert handed_over == [ITEMS / 2]
    assert isinstance(handed_over[0], float)


def test_without_gpus_dataparallel_calls_the_model_itself() -> None:
    model = TwoGpus(Model())
    model.device_ids, model.forward = [], model.module.forward  # type: ignore[method-assign]
    assert step(model, batch(1, 5), ITEMS) == (pytest.approx(6 / ITEMS), 0)


@pytest.mark.parametrize(
    "attributes", [{"compute_loss_func": sum}, {"label_smoother": sum}], ids=["own loss", "label smoothing"]
)
def test_a_loss_of_the_whole_batch_has_all_items(attributes: dict[str, Any]) -> None:
    handed_over: list[Any] = []
    trainer = SimpleNamespace(**{"compute_loss_func": None, "label_smoother": None, **attributes})

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        handed_over.append(num_items_in_batch)

    share_the_items(Call(training_step, trainer, (TwoGpus(Model()), batch(1, 2), ITEMS)))
    assert handed_over == [ITEMS]


def test_one_gpu_is_left_alone(items: Any) -> None:
    assert step(Model(), batch(1, 5), items) == (pytest.approx(6 / ITEMS), 0)


def test_a_step_without_a_count_is_left_alone() -> None:
    handed_over: list[Any] = []
    trainer = SimpleNamespace(compute_loss_func=None, label_smoother=None)

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        handed_over.append(num_items_in_batch)

    share_the_items(Call(training_step, trainer, (TwoGpus(Model()), {"input_ids": None}), {}))
    assert handed_over == [None]


def test_the_stand_in_drops_rows_as_torch_does() -> None:
    """``chunk`` makes one part of one element, and ``scatter_kwargs`` as many calls as the smallest number of parts."""
    model = TwoGpus(Model())
    model(**batch(1, 5), num_items_in_batch=torch.tensor([ITEMS]))
    assert model.rows == [[1]]
    with pytest.raises(RuntimeError, match="at least a 1-dimensional tensor"):
        model(**batch(1, 5), num_items_in_batch=torch.tensor(ITEMS))
