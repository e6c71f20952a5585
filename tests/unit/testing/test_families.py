"""The stand-ins of each trainer family, with made-up trainers where the TRL that is installed has another method.

The self-tests of the patches run them on every release.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest

from trl_hotfix.testing import (
    CharacterTokenizer,
    distillation_stub,
    divergence,
    dpo_stub,
    online_dpo_stub,
    quick_rows,
    quick_sft_prepared,
    sft_prepared,
    stub_grpo_trainer,
    tiny_causal_lm,
)

torch = pytest.importorskip("torch")


@dataclasses.dataclass
class MadeUpConfig:
    beta: float = 0.1
    completion_only_loss: bool | None = None


def a_module(trainer_class: type, method: str, name: str = "made_up") -> Any:
    module = ModuleType(name)
    setattr(module, f"{method}Trainer", trainer_class)
    setattr(module, f"{method}Config", MadeUpConfig)
    return module


def test_a_dpo_stub_computes_the_loss_of_installed_trl() -> None:
    module = pytest.importorskip("trl.trainer.dpo_trainer")
    if not hasattr(module.DPOTrainer, "dpo_loss"):
        pytest.skip("DPO from 0.29 on has no such method")
    trainer = dpo_stub(module, beta=0.5, loss_type="sigmoid", label_smoothing=0.0, reference_free=False, f_alpha=None)
    log_probs = [torch.tensor([value]) for value in (-1.0, -3.0, -2.0, -2.0)]
    loss = torch.nn.functional.logsigmoid(torch.tensor([0.5 * 2.0])).neg()
    assert float(trainer.dpo_loss(*log_probs)[0]) == pytest.approx(float(loss))


def test_the_attributes_of_a_dpo_stub_may_differ() -> None:
    trainer = dpo_stub(a_module(object, "CPO"), "CPO", is_encoder_decoder=True)
    assert (trainer.is_encoder_decoder, trainer.padding_value, trainer.beta) == (True, 0, 0.1)


@pytest.mark.parametrize("with_aux_loss", [False, True])
def test_a_grpo_stub_returns_its_given_log_probs(with_aux_loss: bool) -> None:
    class Plain:
        def _get_per_token_logps_and_entropies(self, model: Any) -> None: ...

    class WithAuxLoss:
        def _get_per_token_logps_and_entropies(self, model: Any, compute_aux_loss: bool) -> None: ...

    log_probs, reference = torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
    module = a_module(WithAuxLoss if with_aux_loss else Plain, "GRPO")
    trainer = stub_grpo_trainer(module, log_probs, reference, training=False, beta=0.3)
    assert trainer._get_per_token_logps(trainer.model) is log_probs
    assert trainer._get_per_token_logps(trainer.ref_model) is reference
    assert len(trainer._get_per_token_logps_and_entropies(trainer.model)) == 2 + with_aux_loss
    assert (trainer.beta, trainer.model.training) == (0.3, False)


def test_an_online_stub_records_what_goes_backward() -> None:
    class OnlineDPOTrainer:
        def training_step(self: Any, model: Any, inputs: Any) -> Any:
            _, _, completions, mask = self._generate_vllm(model, inputs)
            loss = (model(completions).logits.sum(-1) * mask).sum()
            self.accelerator.backward(loss)
            return loss.detach()

    trainer = online_dpo_stub(a_module(OnlineDPOTrainer, "OnlineDPO"), torch.tensor([[1, 2], [3, 4]]), beta=0.7)
    loss = trainer.training_step(trainer.model, {"prompt": ["a"]})
    assert [backward.item() for backward in trainer.went_backward] == [loss.item()]
    assert torch.equal(trainer.ref_model.weight * 2, trainer.model.weight)
    assert torch.equal(trainer.model.weight, tiny_causal_lm().weight)


@pytest.mark.parametrize(("method", "values"), [("XPO", 4), ("NashMD", 2)])
def test_the_loss_of_the_other_online_trainers_is_two(method: str, values: int) -> None:
    name = {"XPO": "trl.trainer.xpo_trainer", "NashMD": "trl.trainer.nash_md_trainer"}[method]
    trainer = online_dpo_stub(a_module(object, method, name))
    assert float(trainer._compute_losses()[0]) == 2.0
    assert len(trainer._compute_logprobs()) == values


@pytest.mark.parametrize("prepare", [sft_prepared, quick_sft_prepared])
def test_rows_are_neither_truncated_nor_packed(prepare: Any) -> None:
    pytest.importorskip("datasets")

    class SFTTrainer:
        def _prepare_dataset(self: Any, dataset: Any, tokenizer: Any, args: Any, packing: bool, *unused: Any) -> Any:
            assert (packing, args.max_length, self.completion_only_loss) == (False, None, False)
            return dataset.map(lambda row: {"input_ids": tokenizer.apply_chat_template(row["messages"])})

    rows = [{"messages": [{"role": "user", "content": "a"}]}]
    prepared = prepare(a_module(SFTTrainer, "SFT"), rows, CharacterTokenizer())
    assert [row["input_ids"] for row in prepared] == [[117, 97, 1]]


def test_quick_rows_are_mapped_as_a_dataset_is() -> None:
    datasets = pytest.importorskip("datasets")
    given = [{"text": "a", "number": 1}, {"text": "bc", "number": 2}]
    rows = quick_rows(given)
    assert isinstance(rows, datasets.IterableDataset)
    assert (rows.column_names, rows[1]) == (["text", "number"], given[1])
    counted = rows.map(lambda row, by: {"length": by * len(row["text"])}, fn_kwargs={"by": 3}, num_proc=2)
    assert list(counted) == [{**given[0], "length": 3}, {**given[1], "length": 6}]
    assert list(rows.map(lambda row: {"letters": row["text"]}, remove_columns="text", desc="Renaming")) == [
        {"letters": "a", "number": 1},
        {"letters": "bc", "number": 2},
    ]
    # What is removed before is there if the function returns it.
    assert list(rows.map(lambda row: {"text": "d"}, remove_columns=["text", "number"])) == [{"text": "d"}] * 2
    doubled = rows.map(lambda columns: {"number": [2 * number for number in columns["number"]]}, batched=True)
    assert list(doubled) == [{"number": 2}, {"number": 4}]
    assert list(rows.filter(lambda row: row["number"] > 1, desc="Dropping")) == given[1:]
    assert [list(rows.select_columns(names)) for names in ("number", ["number"])] == [
        [{"number": 1}, {"number": 2}]
    ] * 2
    assert list(rows.rename_columns({"text": "other"})) == [{"other": "a", "number": 1}, {"other": "bc", "number": 2}]


def test_a_function_that_changes_its_row_leaves_quick_rows_as_they_are() -> None:
    pytest.importorskip("datasets")

    def with_end(row: Any) -> Any:
        row["text"] += "."
        return row

    rows = quick_rows([{"text": "a"}])
    assert list(rows.map(with_end)) == [{"text": "a."}]
    assert list(rows) == [{"text": "a"}]


def test_the_divergence_of_a_distillation_stub_is_that_of_torch() -> None:
    trainer = distillation_stub(object, MadeUpConfig, {"n_gpu": 2}, temperature=0.7)
    assert (trainer.beta, trainer.args.n_gpu, trainer.temperature) == (0.5, 2, 0.7)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    student, teacher = (model.weight[ids[:, :-1]].log_softmax(-1) for model in (trainer.model, trainer.teacher_model))
    kl = torch.nn.functional.kl_div
    for mixes_log_probs, mixture in (
        (False, (student.exp() + teacher.exp()).div(2).log()),
        (True, (student + teacher) / 2),
    ):
        expected = sum(
            0.5 * kl(mixture, side, log_target=True, reduction="none").sum(-1) for side in (student, teacher)
        )
        found = divergence(trainer, ids, mixes_log_probs=mixes_log_probs)
        assert found.shape == (2, 2)
        torch.testing.assert_close(found, expected)
