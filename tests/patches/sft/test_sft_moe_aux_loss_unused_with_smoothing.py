"""The smoothed loss has the auxiliary loss of the router, with the weight that it has without smoothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import sft_trainer

import trl_hotfix
from trl_hotfix.testing import SftMoeStep

import tiny

ID, TARGET = "sft-moe-aux-loss-unused-with-smoothing", "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
TIMES_GAS = "sft-moe-aux-loss-times-gas"
COEFFICIENT = 0.5


class Smoother:
    """Returns the cross-entropy of the outputs, and notes what it is given."""

    ignore_index = -100

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __call__(self, outputs: Any, labels: Any, **options: Any) -> Any:
        self.options.append(options)
        return outputs["cross_entropy"]


def step_of(**attributes: Any) -> Any:
    step = SftMoeStep(sft_trainer, COEFFICIENT, **{"label_smoother": Smoother(), **attributes})
    step.trainer.args.loss_type = "nll"
    return step


def acts(step: Any) -> int:
    return tiny.acts(ID, TARGET, step.trainer) or 0


def of_config(step: Any) -> None:
    """Have the coefficient in the config of the text model alone, as image models have it."""
    del step.model.router_aux_loss_coef
    del step.trainer.router_aux_loss_coef
    step.trainer.args.router_aux_loss_coef = None
    step.coefficient = lambda: COEFFICIENT
    text = SimpleNamespace(router_aux_loss_coef=COEFFICIENT)
    step.model.config = SimpleNamespace(get_text_config=lambda: text)


def of_model(step: Any) -> None:
    """Have the coefficient on the model alone. Its config has what it was loaded with."""
    of_config(step)
    step.model.config.get_text_config().router_aux_loss_coef = 7.0
    step.model.router_aux_loss_coef = COEFFICIENT


def of_trainer(step: Any) -> None:
    """Have the coefficient on the trainer, and another one on the model."""
    step.model.router_aux_loss_coef = 7.0


def of_base(step: Any) -> None:
    """Have an adapter around the model, which hands on no attributes."""
    of_model(step)

    class Adapted(torch.nn.Module):
        def get_base_model(self) -> Any:
            return step.model

    step.trainer.model = Adapted()


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_each_micro_batch_has_its_share(micro_batches: int) -> None:
    step = step_of(current_gradient_accumulation_steps=micro_batches)
    for _ in range(2):
        assert step.weights() == (1.0, pytest.approx(COEFFICIENT / micro_batches))
    assert acts(step) == 2


def test_an_early_transformers_divides_by_the_setting() -> None:
    step = step_of()
    del step.trainer.current_gradient_accumulation_steps
    step.trainer.args.gradient_accumulation_steps = 4
    assert step.weights()[1] == pytest.approx(COEFFICIENT / 4)


def test_it_has_its_whole_weight_where_the_trainer_divides() -> None:
    assert step_of(current_gradient_accumulation_steps=4).weights(items=None)[1] == pytest.approx(COEFFICIENT)
    takes_no_count = step_of(current_gradient_accumulation_steps=4, model_accepts_loss_kwargs=False)
    assert takes_no_count.weights()[1] == pytest.approx(COEFFICIENT)


@pytest.mark.parametrize("items", [None, 8])
def test_it_has_its_whole_weight_in_evaluation(items: int | None) -> None:
    step = step_of(current_gradient_accumulation_steps=4)
    step.model.eval()
    assert step.weights(items=items)[1] == pytest.approx(COEFFICIENT)
    assert acts(step) == 1


def test_ranks_do_not_multiply_it() -> None:
    step = step_of(current_gradient_accumulation_steps=2)
    step.trainer.accelerator.num_processes = 3
    assert step.weights()[1] == pytest.approx(COEFFICIENT / 2)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_it_has_the_same_weight_beside_the_patch_that_divides_the_coefficient(micro_batches: int) -> None:
    step = step_of(current_gradient_accumulation_steps=micro_batches)
    del step.trainer.router_aux_loss_coef
    step.trainer.args.router_aux_loss_coef = None
    with trl_hotfix.patched(TIMES_GAS, ID):
        assert step.weights()[1] == pytest.approx(COEFFICIENT / micro_batches)


@pytest.mark.parametrize("place", [of_config, of_model, of_trainer, of_base])
def test_the_coefficient_is_where_trl_finds_it(place: Any) -> None:
    step = step_of()
    place(step)
    assert step.weights()[1] == pytest.approx(COEFFICIENT)


def test_a_model_without_a_coefficient_keeps_its_loss() -> None:
    step = step_of()
    of_config(step)
    del step.model.config
    assert step.weights() == (1.0, 0.0)
    assert acts(step) == 0


def test_the_outputs_are_returned_too() -> None:
    step = step_of()
    assert step.weights(return_outputs=True) == (1.0, COEFFICIENT)
    assert step.outputs.aux_loss == 2.0


def test_a_model_that_returns_no_such_loss_keeps_its_own() -> None:
    step = step_of(aux_loss_enabled=False)
    forward = step.model.forward
    step.model.forward = lambda **inputs: without_aux_loss(forward(**inputs))
    assert step.weights() == (1.0, 0.0)
    assert acts(step) == 0


def without_aux_loss(outputs: Any) -> Any:
    outputs["aux_loss"] = None
    return outputs


def test_each_trainer_has_its_own() -> None:
    steps = [step_of(current_gradient_accumulation_steps=count) for count in (1, 2)]
    for _ in range(2):
        assert [step.weights()[1] for step in steps] == [COEFFICIENT, COEFFICIENT / 2]


def test_the_trainer_has_its_own_smoother_afterwards() -> None:
    step = step_of()
    smoother = step.trainer.label_smoother
    step.weights()
    assert step.trainer.label_smoother is smoother
    step.model.forward = lambda **inputs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step.weights()
    assert step.trainer.label_smoother is smoother


def test_the_smoother_is_called_as_before(switch: Any) -> None:
    patched, plain = step_of(), step_of()
    patched.weights()
    with switch.off():
        plain.weights()
    assert patched.trainer.label_smoother.options == plain.trainer.label_smoother.options


def test_without_smoothing_nothing_is_added(switch: Any) -> None:
    step = step_of(label_smoother=None)
    patched = step.weights()
    assert acts(step) == 0
    with switch.off():
        assert step.weights() == patched


def test_a_loss_of_the_user_decides() -> None:
    step = step_of(compute_loss_func=lambda outputs, labels, **kwargs: outputs["cross_entropy"])
    assert step.weights() == (1.0, 0.0)
    assert acts(step) == 0


def test_a_coefficient_of_0_adds_nothing() -> None:
    step = step_of(router_aux_loss_coef=0.0)
    assert step.weights()[1] == 0.0
    assert acts(step) == 0


def test_trl_adds_nothing(switch: Any) -> None:
    with switch.off():
        assert step_of().weights() == (1.0, 0.0)
