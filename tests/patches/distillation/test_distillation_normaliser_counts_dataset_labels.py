"""Each micro-batch of a step is divided by the tokens of all of them, as a mean over the ranks."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import distillation_stub, single_process, trainer_and_config

import tiny
from tiny import distillation

ID = "distillation-normaliser-counts-dataset-labels"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
(HERE,) = gates.targets_here(PATCH)
MODULE = importlib.import_module(HERE.module)
TARGET = f"{HERE.module}:{HERE.attribute}"
TRAINER, CONFIG = trainer_and_config(MODULE, "IWOPD", "Distillation")

OF_DATASET = (2, 3, 4)
"""The tokens of the dataset in each micro-batch of a step."""
COUNTED = 27
"""``Trainer`` counts the data once for each micro-batch."""

only_iw_opd = pytest.mark.skipif(TRAINER.__name__ != "IWOPDTrainer", reason="there is no IW-OPD here")


def micro_batch(tokens: int) -> dict[str, Any]:
    """Return two rows of 11 tokens: one ends with a token less than ``tokens`` of an answer, one with a single one."""
    ids = (torch.arange(22).reshape(2, 11) * 3 + tokens) % 11
    labels = torch.full_like(ids, -100)
    labels[0, 12 - tokens :], labels[1, 10:] = ids[0, 12 - tokens :], ids[1, 10:]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def stub(ranks: int = 1, **settings: Any) -> Any:
    """Return a trainer with three micro-batches a step, on rank 0. Rank r has 2 r tokens more than it."""
    settings = {"distillation_objective": "jsd", "loss_top_k": 0, **settings}
    trainer = distillation_stub(
        TRAINER,
        CONFIG,
        {"gradient_accumulation_steps": 3, "report_to": [], "log_completions": False, **settings},
        use_liger_loss=False,
        _local_teacher_tokenizer_matches_student=True,
        _metrics={"train": {}, "eval": {}},
        _buffered_inputs=None,
        _buffer_step=0,
    )
    # The trainer forms small differences of the log-probs.
    for model in (trainer.model, trainer.teacher_model):
        model.double()

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
    trainer._generate_student_completions = generate
    trainer.lmbda = 1.0 if generated else -1.0
    found = []
    for _ in OF_DATASET:
        with single_process(MODULE):
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


def test_a_step_of_one_token_is_divided_by_1() -> None:
    trainer, one = stub(), without_tokens()
    one["labels"][1, 10] = 3
    trainer._buffered_inputs = [without_tokens(), one, without_tokens()]
    assert divisor(trainer, one, 4) == pytest.approx(1)


def test_a_step_without_a_token_has_a_finite_loss() -> None:
    trainer = stub()
    trainer._buffered_inputs = [without_tokens()] * 3
    part = {**without_tokens(), "attention_mask": torch.ones(2, 11).tril(1)}
    assert trainer.compute_loss(trainer.model, part, num_items_in_batch=torch.tensor(0)) == 0


def test_a_dataset_without_completions_has_a_finite_loss(switch: Any) -> None:
    trainer = filled(stub(), 7, 8, 9)
    part = trainer._buffered_inputs[0]
    nothing = torch.tensor(0)
    assert math.isfinite(trainer.compute_loss(trainer.model, part, num_items_in_batch=nothing))
    with switch.off():
        assert math.isinf(trainer.compute_loss(trainer.model, part, num_items_in_batch=nothing))


each_loss = pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"distillation_objective": "iw_opd"}, marks=only_iw_opd, id="IW-OPD"),
        pytest.param({"loss_top_k": 1}, id="the first token"),
        pytest.param({"loss_top_k": 1, "beta": 0.0}, id="forward"),
        pytest.param({"loss_top_k": 3}, id="three tokens"),
        pytest.param({"beta": 1.0}, id="reverse"),
    ],
)


@each_loss
def test_every_loss_of_a_local_teacher_takes_the_count(settings: dict[str, Any], switch: Any) -> None:
    beta = settings.pop("beta", 0.5)
    trainer = filled(stub(**settings), 7, 8, 9)
    trainer.beta = beta
    trainer._metrics["train"] = {f"iw_opd/{name}": [] for name in METRICS}
    part, counted = trainer._buffered_inputs[1], torch.tensor(COUNTED)
    loss = trainer.compute_loss(trainer.model, part, num_items_in_batch=counted)
    with switch.off():
        of_trl = trainer.compute_loss(trainer.model, part, num_items_in_batch=counted)
    assert float(of_trl.detach()) != 0
    torch.testing.assert_close(loss * (7 + 8 + 9), of_trl * COUNTED)


METRICS = "mean_advantage", "mean_abs_advantage", "mean_weight", "min_weight", "max_weight"


def of_server(part: dict[str, Any]) -> dict[str, Any]:
    """Return a server's log-probs of all tokens behind the first."""
    log_probs = torch.linspace(-2, -1, 20).reshape(2, 10)
    ids = part["input_ids"][:, 1:, None]
    return {"actual_logprobs": log_probs, "topk_logprobs": log_probs[..., None], "topk_token_ids": ids}


def with_server(**settings: Any) -> tuple[Any, dict[str, Any]]:
    trainer = filled(stub(ranks=4, use_teacher_server=True, loss_top_k=1, **settings), 7, 8, 9)
    part = trainer._buffered_inputs[0]
    trainer._compute_prompt_length = lambda inputs: 1
    trainer._get_teacher_token_logprobs_from_server = lambda *args: of_server(part)
    trainer._metrics["train"] = {f"iw_opd/{name}": [] for name in METRICS}
    trainer.teacher_model = None
    return trainer, part


def test_a_mean_over_the_tokens_with_a_teacher_server_is_left_alone(switch: Any) -> None:
    trainer, part = with_server()
    loss = trainer.compute_loss(trainer.model, part, num_items_in_batch=torch.tensor(COUNTED))
    assert (trainer.gathered, tiny.acts(ID, TARGET, trainer)) == (0, 0)
    with switch.off():
        assert loss.equal(trainer.compute_loss(trainer.model, part, num_items_in_batch=torch.tensor(COUNTED)))


@only_iw_opd
def test_iw_opd_takes_the_count_with_a_teacher_server_too(switch: Any) -> None:
    trainer, part = with_server(distillation_objective="iw_opd")
    loss = trainer.compute_loss(trainer.model, part, num_items_in_batch=torch.tensor(COUNTED))
    with switch.off():
        of_trl = trainer.compute_loss(trainer.model, part, num_items_in_batch=torch.tensor(COUNTED))
    torch.testing.assert_close(loss * (24 + 3), of_trl * COUNTED * 1.0)


def test_the_loss_of_liger_takes_the_count() -> None:
    if not hasattr(TRAINER, "_compute_liger_loss"):
        pytest.skip("this release has no loss of Liger here")
    trainer = filled(stub(), 7, 8, 9)
    trainer.use_liger_loss = True
    given: list[Any] = []
    trainer._compute_liger_loss = lambda model, inputs, num_items_in_batch: given.append(num_items_in_batch)
    trainer.compute_loss(trainer.model, trainer._buffered_inputs[0], num_items_in_batch=torch.tensor(COUNTED))
    assert given == [24]


def test_outputs_are_those_of_trl() -> None:
    trainer = filled(stub(), 7, 8, 9)
    part = trainer._buffered_inputs[0]
    count = torch.tensor(COUNTED)
    loss, outputs = trainer.compute_loss(trainer.model, part, return_outputs=True, num_items_in_batch=count)
    assert loss.equal(trainer.compute_loss(trainer.model, part, num_items_in_batch=count))
    assert outputs.logits.shape[:2] == part["input_ids"].shape
