"""The evaluation set keeps the reference of the untrained policy if the run evaluates; else there is a warning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from trl.trainer import dpo_trainer

from trl_hotfix.testing import default_arguments, stub_trainer

pytestmark = pytest.mark.usefixtures("messages")

BEFORE, AFTER = -1.0, -2.0
"""The policy's log-prob of a chosen completion before training, and at the first evaluation."""


class Rows:
    """Stand for a dataset; ``columns`` has the columns that were added."""

    def __init__(self, number: int = 2, columns: dict[str, Any] | None = None) -> None:
        self.number, self.columns = number, columns or {}

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": index}

    def add_column(self, name: str, column: Any) -> Rows:
        return Rows(self.number, {**self.columns, name: column.tolist()})


class Parent(transformers.Trainer):
    """Comes before transformers' own class in the method resolution order."""

    def get_train_dataloader(self) -> str:
        self.asked.append("train")
        return "the training rows"

    def get_eval_dataloader(self, eval_dataset: Any = None) -> None:
        self.asked.append("eval")


@pytest.fixture(autouse=True)
def no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpo_trainer, "tqdm", lambda iterable, **kwargs: iterable)


def stub(*, training: bool = True, do_eval: bool = True, **attributes: Any) -> Any:
    def reference(batch: list[dict[str, int]]) -> tuple[Any, Any]:
        # The logits of a model with dropout would draw random numbers as well.
        torch.rand(1)
        chosen = torch.tensor([trainer.log_prob - row["row"] / 4 for row in batch])
        return chosen, 2 * chosen

    arguments = default_arguments(
        dpo_trainer.DPOConfig, do_eval=do_eval, dataloader_pin_memory=False, per_device_eval_batch_size=2
    )
    defaults = {
        "log_prob": BEFORE,
        "asked": [],
        "model": SimpleNamespace(training=training),
        "ref_model": None,
        "is_peft_model": False,
        "train_dataset": Rows(),
        "eval_dataset": Rows(),
        "data_collator": list,
        "precompute_ref_log_probs": True,
        # With True only the evaluation set draws random numbers.
        "_precomputed_train_ref_log_probs": True,
        "_precomputed_eval_ref_log_probs": False,
        # The second name is that of releases up to 0.11.
        "compute_ref_log_probs": reference,
        "compute_reference_log_probs": reference,
    }
    trainer_class = type("DPOTrainer", (dpo_trainer.DPOTrainer, Parent), {})
    trainer = stub_trainer(trainer_class, arguments, **{**defaults, **attributes})
    trainer.accelerator.prepare, trainer.accelerator.free_memory = (lambda loader: loader), (lambda: None)
    return trainer


def references_of(dataset: Rows) -> dict[str, list[float]]:
    """Return the log-probs of the rows, by ``chosen`` and ``rejected``."""
    return {name.split("_")[1]: column for name, column in dataset.columns.items()}


def references(log_prob: float, rows: int) -> dict[str, list[float]]:
    chosen = [log_prob - row / 4 for row in range(rows)]
    return {"chosen": chosen, "rejected": [2 * value for value in chosen]}


def trained(trainer: Any) -> Any:
    """Have a trainer ask for the training rows, train, and evaluate for the first time."""
    trainer.get_train_dataloader()
    trainer.log_prob = AFTER
    trainer.get_eval_dataloader()
    return trainer


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_each_row_keeps_the_reference_of_the_untrained_policy(training: bool, rows: int) -> None:
    trainer = trained(stub(training=training, eval_dataset=Rows(rows)))
    assert references_of(trainer.eval_dataset) == references(BEFORE, rows)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_trl_takes_the_trained_policy(training: bool, switch: Any) -> None:
    with switch.off():
        trainer = trained(stub(training=training))
    assert references_of(trainer.eval_dataset) == references(AFTER, 2)


def test_each_trainer_keeps_its_own() -> None:
    trainers = [stub(), stub()]
    for trainer in trainers:
        trained(trainer)
    for trainer in trainers:
        assert references_of(trainer.eval_dataset) == references(BEFORE, 2)


def test_the_training_set_is_precomputed_as_well() -> None:
    trainer = trained(stub(_precomputed_train_ref_log_probs=False))
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        assert references_of(dataset) == references(BEFORE, 2)


def test_the_training_rows_are_trls() -> None:
    trainer = stub()
    assert trainer.get_train_dataloader() == "the training rows"
    assert trainer.asked == ["eval", "train"]


def test_the_random_state_stays_as_it_was() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    trainer = stub()
    trainer.get_train_dataloader()
    assert references_of(trainer.eval_dataset)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "changed",
    [
        {"ref_model": object()},
        {"is_peft_model": True},
        {"precompute_ref_log_probs": False},
        {"_precomputed_eval_ref_log_probs": True},
        {"eval_dataset": None},
        {"eval_dataset": {"one": Rows(), "other": Rows()}},
    ],
    ids=lambda changed: next(iter(changed)),
)
@pytest.mark.parametrize("do_eval", [True, False], ids=["do_eval", "no do_eval"])
def test_no_other_evaluation_set_is_computed_or_warned_of(
    changed: dict[str, Any], do_eval: bool, messages: list[str]
) -> None:
    trainer = stub(do_eval=do_eval, **changed)
    dataset = trainer.eval_dataset
    for _ in range(2):
        assert trainer.get_train_dataloader() == "the training rows"
    assert trainer.eval_dataset is dataset
    assert trainer.asked == ["train", "train"]
    assert not messages


def test_a_run_that_does_not_evaluate_computes_nothing_and_warns_once_for_each_trainer(messages: list[str]) -> None:
    for _ in range(2):
        trainer = stub(do_eval=False)
        dataset = trainer.eval_dataset
        for _ in range(2):
            assert trainer.get_train_dataloader() == "the training rows"
        assert trainer.eval_dataset is dataset
        assert trainer.asked == ["train", "train"]
    assert len(messages) == 2
    assert all("set do_eval=True in the DPOConfig" in message for message in messages)


def test_a_run_that_evaluates_is_computed_once_and_not_warned(messages: list[str]) -> None:
    trainer = stub()
    for _ in range(2):
        trainer.get_train_dataloader()
    assert trainer.asked == ["eval", "train", "train"]
    assert not messages
