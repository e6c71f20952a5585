"""Each micro-batch of a step is divided by the tokens of all of them, as a mean over the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.experimental.gold import gold_trainer

from trl_hotfix.testing import distillation_stub, single_process

import tiny
from tiny import distillation

ID, TARGET = (
    "gold-loss-normaliser-counts-dataset-labels",
    "trl.experimental.gold.gold_trainer:GOLDTrainer.compute_loss",
)
OF_DATASET = (2, 3, 4)
"""The tokens of the dataset in each micro-batch of a step."""
COUNTED = 27
"""``Trainer`` counts the data once for each micro-batch."""


def micro_batch(tokens: int) -> dict[str, Any]:
    """Return two rows: one ends with a token less than ``tokens``, one has no prompt. Its first token is no target."""
    ids = (torch.arange(22).reshape(2, 11) * 3 + tokens) % 11
    labels = torch.full_like(ids, -100)
    labels[0, 12 - tokens :], labels[1, :2] = ids[0, 12 - tokens :], ids[1, :2]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def stub(ranks: int = 1, **settings: Any) -> Any:
    """Return a trainer with three micro-batches a step, on rank 0. Rank r has 2 r tokens more than it."""
    trainer = distillation_stub(
        gold_trainer.GOLDTrainer,
        gold_trainer.GOLDConfig,
        {"gradient_accumulation_steps": 3, "report_to": [], **settings},
        temperature=1.0,
        teacher_tokenizer=None,
        processing_class=SimpleNamespace(pad_token_id=None),
        pad_token_id=None,
        _vlm_collator=None,
        _buffered_inputs=None,
        _step=0,
    )

    def gather(count: Any) -> Any:
        trainer.gathered += 1
        return torch.stack([count + 2 * rank for rank in range(ranks)])

    trainer.gathered, trainer.accelerator.num_processes, trainer.accelerator.gather = 0, ranks, gather
    return trainer


def divisor(trainer: Any, part: dict[str, Any], counted: int | None = COUNTED) -> float:
    return distillation.divisor(trainer, part, counted)


def divisors_of_step(trainer: Any, generated: tuple[int, ...] = (), counted: int = COUNTED) -> list[float]:
    """Fill TRL's buffer with the data, and 7, 8 and 9 tokens in those micro-batches that are generated. Use it."""

    def generate(slices: Any, indices: Any) -> None:
        for number, part in enumerate(slices):
            trainer._buffered_inputs[number] = micro_batch(number + 7) if number in generated else part

    parts = [micro_batch(tokens) for tokens in OF_DATASET]
    window = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    trainer._generate_on_policy_for_slices = generate
    trainer.lmbda = 1.0 if generated else 0.0
    found = []
    for _ in OF_DATASET:
        with single_process(gold_trainer):
            part = trainer._prepare_inputs(window)
        found.append(divisor(trainer, part, counted))
    return found


each_step = pytest.mark.parametrize(
    ("generated", "right"),
    [((), 2 + 3 + 4), ((0,), 7 + 3 + 4), ((1, 2), 2 + 8 + 9), ((0, 1, 2), 7 + 8 + 9)],
    ids=["dataset", "the first", "the others", "all"],
)


@each_step
def test_each_micro_batch_is_divided_by_the_tokens_of_all(generated: tuple[int, ...], right: int) -> None:
    trainer = stub()
    for _ in range(2):
        assert divisors_of_step(trainer, generated) == pytest.approx([right] * 3)
    assert tiny.acts(ID, TARGET, trainer) == 6


@each_step
def test_trl_divides_by_the_count_of_the_dataset(generated: tuple[int, ...], right: int, switch: Any) -> None:
    trainer = stub()
    with switch.off():
        assert divisors_of_step(trainer, generated) == pytest.approx([COUNTED] * 3)


@each_step
def test_the_tokens_are_a_mean_over_the_ranks(generated: tuple[int, ...], right: int) -> None:
    trainer = stub(ranks=4)
    assert divisors_of_step(trainer, generated, counted=144) == pytest.approx([right + (2 + 4 + 6) / 4] * 3)


@each_step
def test_ranks_that_count_their_own_tokens_are_not_asked(generated: tuple[int, ...], right: int) -> None:
    trainer = stub(ranks=4, average_tokens_across_devices=False)
    assert divisors_of_step(trainer, generated) == pytest.approx([right] * 3)
    assert trainer.gathered == 0


def test_each_trainer_has_a_step_of_its_own() -> None:
    trainers = stub(), stub()
    for _ in range(2):
        for number, trainer in enumerate(trainers):
            assert divisors_of_step(trainer, (number,)) == pytest.approx([9 + 5] * 3)


def filled(trainer: Any, *tokens: int) -> Any:
    trainer._buffered_inputs = [micro_batch(count) for count in tokens]
    return trainer


def test_a_right_count_is_left_as_it_is() -> None:
    trainer = filled(stub(), 7, 8, 9)
    assert divisor(trainer, trainer._buffered_inputs[0], 24) == pytest.approx(24)
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_a_loss_without_a_count_is_a_mean_over_its_tokens() -> None:
    trainer = filled(stub(ranks=4), 7, 8, 9)
    assert divisor(trainer, trainer._buffered_inputs[0], None) == pytest.approx(7)
    assert trainer.gathered == 0


def test_an_evaluation_is_divided_by_its_count() -> None:
    trainer = filled(stub(), 7, 8, 9)
    trainer.model.eval()
    assert divisor(trainer, trainer._buffered_inputs[0], 5) == pytest.approx(5)


def test_a_trainer_without_a_buffer_divides_by_its_count() -> None:
    trainer = stub()
    assert divisor(trainer, micro_batch(7), 5) == pytest.approx(5)
    assert tiny.acts(ID, TARGET, trainer) == 0


def without_tokens() -> dict[str, Any]:
    part = micro_batch(7)
    return {**part, "labels": torch.full_like(part["labels"], -100)}


def test_a_step_without_a_token_has_the_loss_0() -> None:
    trainer = stub()
    trainer._buffered_inputs = [without_tokens()] * 3
    assert trainer.compute_loss(trainer.model, without_tokens(), num_items_in_batch=torch.tensor(4)) == 0


def test_a_step_of_one_token_is_divided_by_1() -> None:
    trainer, one = stub(), without_tokens()
    one["labels"][1, 2] = 3
    trainer._buffered_inputs = [without_tokens(), one, without_tokens()]
    assert divisor(trainer, one, 4) == pytest.approx(1)


def test_the_loss_across_tokenizers_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = filled(stub(ranks=4), 4)
    (part,) = trainer._buffered_inputs

    def uld_loss(student_logits: Any, **kwargs: Any) -> Any:
        return student_logits.sum()

    uld_loss.use_extended_uld = False  # type: ignore[attr-defined]
    across = {"use_uld_loss": True, "teacher_tokenizer": SimpleNamespace(pad_token_id=None), "uld_loss_fn": uld_loss}
    vars(trainer).update(across, _teacher_processor=None)
    of_teacher = part["input_ids"], part["labels"], part["attention_mask"], None
    monkeypatch.setattr(gold_trainer, "build_teacher_inputs_from_texts", lambda *args, **kwargs: of_teacher)
    texts = {"original_prompt_text": [""] * 2, "original_completion_text": [""] * 2}
    loss = trainer.compute_loss(trainer.model, {**part, **texts}, num_items_in_batch=torch.tensor(5))
    assert loss.equal(trainer.model.weight[part["input_ids"]].sum())
    assert trainer.gathered == 0
