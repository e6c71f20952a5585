"""CISPO's arguments have a cap of 5 before GRPO reads them, where they have none; all others stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import StopConstruction, begin_trainer, stub_grpo_trainer, tiny_causal_lm

LINE = 'loss_type="cispo" without epsilon_high: the ratio is capped at 5, and not at epsilon=0.2'


class ReadError(Exception):
    """Raised where the constructor reads an argument that the wrapper does not."""


class Arguments:
    """The arguments that the wrapper reads."""

    def __init__(self, loss_type: str = "cispo", epsilon: float = 0.2, epsilon_high: float | None = None) -> None:
        self.loss_type, self.epsilon, self.epsilon_high = loss_type, epsilon, epsilon_high

    def __getattr__(self, name: str) -> Any:
        raise ReadError(name)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Return a function that gives level and text of what the wrapper has logged."""
    with caplog.at_level(logging.INFO, "trl_hotfix"):
        yield lambda: [
            (record.levelname, record.getMessage()) for record in caplog.records if "cispo" in record.getMessage()
        ]


def cap(trainer_class: Any = grpo_trainer.GRPOTrainer, **settings: Any) -> float | None:
    """Return the ``epsilon_high`` that TRL's constructor reads."""
    arguments = Arguments(**settings)
    with pytest.raises(ReadError):
        trainer_class("no model", [], args=arguments)
    return arguments.epsilon_high


def subclass(module: str, **attributes: Any) -> Any:
    return type("Subclass", (grpo_trainer.GRPOTrainer,), {"__module__": module, **attributes})


def gradients(ratios: list[float], *, training: bool = True) -> list[float]:
    """Return by what each token's log-prob is multiplied: its weight, where the advantages are 1 and -1."""

    def end(trainer: Any) -> None:
        raise StopConstruction

    model = tiny_causal_lm(SimpleNamespace(get_text_config=SimpleNamespace, _name_or_path="tiny"))
    model.warnings_issued, model.generation_config = {}, SimpleNamespace(eos_token_id=None)
    begun = begin_trainer(grpo_trainer, grpo_trainer.GRPOTrainer, model, parent=end, loss_type="cispo")
    log_probs = torch.tensor([ratios] * 2).log().requires_grad_()
    trainer = stub_grpo_trainer(
        grpo_trainer, log_probs, training=training, loss_type="cispo", beta=0.0, steps_per_generation=1
    )
    trainer.epsilon_high = begun.epsilon_high
    ids = torch.ones(2, len(ratios), dtype=torch.long)
    inputs = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), ids)
    inputs |= {"advantages": torch.tensor([1.0, -1.0]), "num_items_in_batch": torch.tensor(1.0)}
    inputs |= {"old_per_token_logps": torch.zeros(2, len(ratios))}
    (gradient,) = torch.autograd.grad(trainer._compute_loss(None, inputs), log_probs)
    assert gradient[0].equal(-gradient[1])
    mode = "train" if training else "eval"
    clipped = trainer._metrics[mode]["cispo_clip_ratio"]
    assert clipped == [pytest.approx(sum(ratio > trainer.epsilon_high for ratio in ratios) / (2 * len(ratios)))]
    return [round(float(-value), 4) for value in gradient[0]]


@pytest.mark.parametrize("training", [True, False])
def test_ratios_up_to_5_are_weights(training: bool) -> None:
    assert gradients([0.1, 1.0, 4.5, 8.0], training=training) == [0.1, 1.0, 4.5, 5.0]


def test_without_the_patch_every_weight_is_epsilon_at_most(switch: Any) -> None:
    with switch.off():
        assert gradients([0.1, 1.0, 4.5, 8.0]) == [0.1, 0.2, 0.2, 0.2]


def test_each_trainer_has_the_cap_and_the_log_has_one_line(lines: Any) -> None:
    for number in range(2):
        assert cap() == 5.0
        assert lines()[number:] == [("INFO", LINE)]


@pytest.mark.parametrize("epsilon", [0.1, 0.4, 0.99])
def test_any_epsilon_below_1_is_no_cap(epsilon: float) -> None:
    assert cap(epsilon=epsilon) == 5.0


@pytest.mark.parametrize("epsilon", [1.0, 1.2, 4.0])
def test_an_epsilon_that_can_be_a_cap_is_one(lines: Any, epsilon: float) -> None:
    assert cap(epsilon=epsilon) is None
    assert not lines()


@pytest.mark.parametrize("epsilon_high", [0.0, 0.28, 1.0, 3.0, 5.0])
def test_a_cap_of_the_user_stays(lines: Any, epsilon_high: float) -> None:
    assert cap(epsilon_high=epsilon_high) == epsilon_high
    assert not lines()


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "sapo"])
def test_other_losses_fall_back_to_epsilon(lines: Any, loss_type: str) -> None:
    assert cap(loss_type=loss_type) is None
    assert not lines()


def test_a_trainer_without_arguments_is_made_as_it_was(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_arguments(*args: Any, **settings: Any) -> None:
        raise ReadError("GRPOConfig")

    monkeypatch.setattr(grpo_trainer, "GRPOConfig", make_arguments)
    with pytest.raises(ReadError):
        grpo_trainer.GRPOTrainer("no model", [])
    assert not lines()


def loss_of_its_own(trainer: Any, model: Any, inputs: Any) -> None:
    pass


def test_a_trainer_of_trl_with_another_loss_stays_as_it_is(lines: Any) -> None:
    gmpo = subclass("trl.experimental.gmpo.gmpo_trainer", _compute_loss=loss_of_its_own)
    of_a_user = type("OfAUser", (gmpo,), {"__module__": "train"})
    assert [cap(gmpo), cap(of_a_user)] == [None, None]
    assert not lines()


def test_subclasses_with_the_loss_of_grpo_have_the_cap() -> None:
    assert cap(subclass("trl.experimental.gfpo.gfpo_trainer")) == 5.0
    assert cap(subclass("train", _compute_loss=loss_of_its_own)) == 5.0
