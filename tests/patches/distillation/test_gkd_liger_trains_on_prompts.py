"""The trainers distil what has a label, with the real loss of Liger: on unequal rows, and on rows without a label."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest
import torch

from trl_hotfix.testing import distillation_stub, divergence, give_decoder

import tiny

if version("liger-kernel") != "0.6.4":
    pytest.skip("the bug is in Liger before 0.6.5", allow_module_level=True)

ID = "gkd-liger-trains-on-prompts"
METHODS = ("GKD", "GOLD", "Distillation")
BATCHES: dict[str, Sequence[Sequence[int]]] = {
    "one row": [[-100, -100, 3, 4]],
    "unequal rows": [[-100, -100, -100, 4], [-100, 6, 7, 8], [-100, -100, 3, -100]],
    "all labels": [[-100, 5, 6, 7], [-100, 1, 2, 3]],
    "a row without labels": [[-100, -100, -100, -100], [-100, -100, 3, 4]],
}


@pytest.fixture(params=METHODS)
def trainer(request: Any) -> Any:
    trainer_class, config_class = tiny.classes(request.param)
    module = trainer_class and import_module(trainer_class.__module__)
    if not hasattr(module, "LigerFusedLinearJSDLoss") or module.__name__.startswith("trl.trainer.distillation"):
        pytest.skip("this release has no such trainer with Liger's loss")
    kernel = module.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False)
    return stub(trainer_class, config_class, kernel)


def stub(trainer_class: Any, config_class: Any, kernel: Any) -> Any:
    trainer = distillation_stub(
        trainer_class,
        config_class,
        use_liger_gkd_loss=True,
        use_liger_loss=True,
        use_uld_loss=False,
        _is_vlm=False,
        _buffered_num_items=None,
        _local_teacher_tokenizer_matches_student=True,
        _forward_redirection=lambda model, module, method, *args: method(*args),
        **{name_of_kernel(trainer_class): kernel},
    )
    for model in (trainer.model, trainer.teacher_model):
        give_decoder(model)
    return trainer


def name_of_kernel(trainer_class: type) -> str:
    names = inspect.unwrap(trainer_class.__init__).__code__.co_names
    return "liger_loss" if "liger_loss" in names else "liger_jsd_loss"


def batch_of(labels: Sequence[Sequence[int]]) -> dict[str, Any]:
    token_ids = torch.tensor([[row + 1, *range(5 + row, 8 + row)] for row in range(len(labels))])
    as_labels = torch.tensor(labels)
    return {
        "input_ids": torch.where(as_labels == -100, token_ids, as_labels),
        "attention_mask": torch.ones_like(token_ids),
        "labels": as_labels,
    }


def loss_and_gradient(trainer: Any, loss: Any) -> tuple[Any, Any]:
    return loss.detach(), torch.autograd.grad(loss, trainer.model.weight)[0]


def assert_right(trainer: Any, batch: dict[str, Any]) -> None:
    counts = batch["labels"][:, 1:] != -100
    expected = (divergence(trainer, batch["input_ids"]) * counts).sum() / counts.sum().clamp(min=1)
    measured = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(loss_and_gradient(trainer, measured), loss_and_gradient(trainer, expected))


@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES)
def test_the_loss_is_the_mean_over_the_labels(trainer: Any, labels: Sequence[Sequence[int]]) -> None:
    assert_right(trainer, batch_of(labels))
    assert tiny.acts(ID, target(trainer), trainer) == 1


def test_a_batch_without_a_label_has_no_gradient(trainer: Any) -> None:
    assert_right(trainer, batch_of([[-100] * 4] * 2))


def test_evaluation_has_the_same_loss(trainer: Any) -> None:
    trainer.model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, batch_of(BATCHES["unequal rows"]))
    trainer.model.train()
    torch.testing.assert_close(loss, trainer.compute_loss(trainer.model, batch_of(BATCHES["unequal rows"])).detach())


def test_trl_and_liger_distil_prompts(trainer: Any, switch: Any) -> None:
    with switch.off(), pytest.raises(AssertionError):
        assert_right(trainer, batch_of(BATCHES["unequal rows"]))


def test_the_kernel_is_put_back(trainer: Any) -> None:
    before = dict(vars(trainer))
    trainer.compute_loss(trainer.model, batch_of(BATCHES["one row"]))
    assert vars(trainer) == before


def test_a_biased_head_keeps_its_bias(trainer: Any) -> None:
    bias = torch.linspace(-1, 1, len(trainer.model.weight))
    trainer.model.get_output_embeddings().bias = bias
    batch = batch_of(BATCHES["unequal rows"])
    biased = trainer.compute_loss(trainer.model, batch)
    trainer.model.get_output_embeddings().bias = None
    assert not torch.isclose(biased, trainer.compute_loss(trainer.model, batch))


def test_a_loss_of_trl_is_left_alone(trainer: Any) -> None:
    delattr(trainer, name_of_kernel(type(trainer).__mro__[1]))
    trainer.use_liger_gkd_loss = trainer.use_liger_loss = False
    batch = {**batch_of(BATCHES["one row"]), "prompts": torch.ones(1, 1, dtype=torch.long)}
    trainer.compute_loss(trainer.model, batch)
    assert not tiny.acts(ID, target(trainer), trainer)


def target(trainer: Any) -> str:
    base = type(trainer).__mro__[1]
    return f"{base.__module__}:{base.__name__}.compute_loss"
