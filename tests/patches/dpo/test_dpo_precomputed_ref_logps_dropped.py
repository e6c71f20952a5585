"""The precomputed reference of each row is in its loss, and a collator of the user's that drops it is warned of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wrapt
from trl.trainer import dpo_trainer
from trl.trainer.dpo_trainer import DPOTrainer, PreferenceCollator

from trl_hotfix.authoring import Call
from trl_hotfix.patches.dpo import dpo_precomputed_ref_logps_dropped as patch
from trl_hotfix.testing import (
    Pair,
    dpo_stub,
    pair_log_probs,
    pair_loss,
    pair_micro_batches,
    tiny_causal_lm,
)

pytestmark = pytest.mark.usefixtures("messages")

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
MICRO_BATCHES = tuple(pair_micro_batches())
PAIRS = MICRO_BATCHES[0].pairs


class Forgetful:
    """A collator of the user's that drops the reference."""

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        return PreferenceCollator(pad_token_id=0)(
            [{key: row[key] for key in row if key not in COLUMNS} for row in rows]
        )


def stub(*, workers: int = 0, **attributes: Any) -> Any:
    """Return a trainer without ``ref_model`` that has precomputed the reference of its training set."""
    defaults: dict[str, Any] = {
        "model": tiny_causal_lm(),
        "ref_model": None,
        "precompute_ref_log_probs": True,
        "state": SimpleNamespace(global_step=0),
        "data_collator": PreferenceCollator(pad_token_id=0),
        "_precomputed_train_ref_log_probs": True,
        "_signature_columns": None,
    }
    trainer = dpo_stub(dpo_trainer, **{**defaults, **attributes})
    trainer.args.dataloader_num_workers = workers
    trainer._set_signature_columns_if_needed()
    return trainer


def rows_of(pairs: Sequence[Pair], columns: Sequence[str] = COLUMNS) -> list[dict[str, Any]]:
    rows = []
    for pair in pairs:
        row: dict[str, Any] = {f"{name}_input_ids": getattr(pair, name) for name in ("prompt", "chosen", "rejected")}
        rows.append(row | {name: value for name, value in zip(COLUMNS, pair.reference, strict=True) if name in columns})
    return rows


def loss_of(trainer: Any, pairs: Sequence[Pair] = PAIRS, train_eval: str = "train") -> Any:
    """Take rows of these pairs from the dataset to the loss."""
    rows = [{key: row[key] for key in row if key in trainer._signature_columns} for row in rows_of(pairs)]
    batch = trainer.data_collator(rows)
    return trainer.get_batch_loss_metrics(trainer.model, batch=batch, train_eval=train_eval)[0]


def expected(trainer: Any, pairs: Sequence[Pair] = PAIRS) -> Any:
    chosen, rejected = torch.tensor([pair.reference for pair in pairs]).T
    return pair_loss(trainer.args.beta, pair_log_probs(trainer.model, pairs), (chosen, rejected))


def gradient(loss: Any, trainer: Any) -> Any:
    return torch.autograd.grad(loss, trainer.model.weight)[0]


@pytest.mark.parametrize("train_eval", ["train", "eval"])
def test_the_loss_of_each_micro_batch_has_the_reference_of_its_rows(train_eval: str) -> None:
    trainer = stub()
    trainer.model.train(train_eval == "train")
    for micro_batch in MICRO_BATCHES:
        trainer.state.global_step = micro_batch.step
        loss, right = loss_of(trainer, micro_batch.pairs, train_eval), expected(trainer, micro_batch.pairs)
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(gradient(loss, trainer), gradient(right, trainer))


def test_each_trainer_has_the_reference_of_its_rows() -> None:
    for trainer in [stub(), stub()]:
        torch.testing.assert_close(loss_of(trainer), expected(trainer))


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_trl_takes_the_policy_as_its_own_reference(micro_batch: Any, switch: Any) -> None:
    with switch.off():
        trainer = stub()
        trainer.model.train(micro_batch.is_training)
        loss = loss_of(trainer, micro_batch.pairs, "train" if micro_batch.is_training else "eval")
    assert float(loss) == pytest.approx(math.log(2))


def test_the_reference_is_not_computed_again() -> None:
    trainer = stub(ref_model=tiny_causal_lm())

    def fail(batch: Any) -> None:
        raise AssertionError("the reference was computed again")

    trainer.compute_ref_log_probs = fail
    torch.testing.assert_close(loss_of(trainer), expected(trainer))


@pytest.mark.parametrize(
    ("owner", "name", "wrapper"),
    [
        (DPOTrainer, "_set_signature_columns_if_needed", patch.keep_the_columns),
        (PreferenceCollator, "torch_call", patch.keep_the_values),
    ],
    ids=["columns", "values"],
)
def test_each_half_alone_repairs_nothing(
    owner: type, name: str, wrapper: Any, switch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapper(Call(wrapped, instance, args, kwargs))

    with switch.off(), monkeypatch.context() as patching:
        patching.setattr(owner, name, wrapt.FunctionWrapper(vars(owner)[name], half))
        assert float(loss_of(stub()).detach()) == pytest.approx(math.log(2))


@pytest.mark.parametrize("precompute", [True, False])
def test_the_columns_are_added_once(precompute: bool) -> None:
    trainer = stub(precompute_ref_log_probs=precompute)
    # transformers asks for the columns of the training set, and then for those of the evaluation set.
    for _ in range(2):
        assert sorted(trainer._signature_columns) == [
            "chosen_input_ids",
            "prompt_input_ids",
            *COLUMNS,
            "rejected_input_ids",
        ]
        trainer._set_signature_columns_if_needed()


def test_columns_that_are_set_stay_as_they_are() -> None:
    columns = ["prompt_input_ids"]
    assert stub(_signature_columns=columns)._signature_columns is columns
    assert columns == ["prompt_input_ids"]


def test_the_values_are_a_tensor_of_the_rows() -> None:
    batch = PreferenceCollator(pad_token_id=0)(examples := rows_of(PAIRS))
    for name in COLUMNS:
        torch.testing.assert_close(batch[name], torch.tensor([row[name] for row in examples]))


@pytest.mark.parametrize("columns", [(), COLUMNS[:1], COLUMNS[1:]], ids=["none", "chosen", "rejected"])
def test_rows_without_both_values_give_none(columns: Sequence[str], switch: Any) -> None:
    rows = rows_of(PAIRS, columns)
    batch = PreferenceCollator(pad_token_id=0)(rows)
    assert not set(COLUMNS) & set(batch)
    with switch.off():
        torch.testing.assert_close(batch, PreferenceCollator(pad_token_id=0)(rows))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_collator_carries_its_method_to_workers(workers: int) -> None:
    trainer = stub(workers=workers)
    assert ("torch_call" in vars(trainer.data_collator)) == bool(workers)
    torch.testing.assert_close(loss_of(trainer), expected(trainer))


def test_a_collator_of_the_users_is_not_changed() -> None:
    assert not vars(stub(workers=1, data_collator=Forgetful()).data_collator)


def test_each_trainer_is_warned_once_of_a_collator_that_drops_the_values(messages: list[str]) -> None:
    for _ in range(2):
        trainer = stub(data_collator=Forgetful())
        for _ in range(2):
            assert float(loss_of(trainer).detach()) == pytest.approx(math.log(2))
    assert len(messages) == 2
    assert all("the data collator (Forgetful) drops them" in message for message in messages)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_batch_that_lacks_one_value_is_warned_of(name: str, messages: list[str]) -> None:
    trainer = stub()
    batch = trainer.data_collator(rows_of(PAIRS))
    del batch[name]
    trainer.get_batch_loss_metrics(trainer.model, batch)
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("attributes", "train_eval"),
    [
        ({}, "train"),
        ({"data_collator": Forgetful()}, "eval"),
        ({"data_collator": Forgetful(), "_precomputed_train_ref_log_probs": False}, "train"),
    ],
    ids=["complete", "evaluation", "not precomputed"],
)
def test_no_other_batch_is_warned_of(attributes: dict[str, Any], train_eval: str, messages: list[str]) -> None:
    trainer = stub(**attributes)
    for _ in range(2):
        loss_of(trainer, train_eval=train_eval)
    assert not messages
