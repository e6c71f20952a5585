"""The auxiliary loss of a step is the mean over its micro-batches and ranks, wherever the model has its coefficient."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import sft_trainer

from trl_hotfix.testing import SftMoeStep, recorded_warnings

import tiny

ID, TARGET = "sft-moe-aux-loss-times-gas", "trl.trainer.sft_trainer:SFTTrainer.compute_loss"

COEFFICIENT = 0.5
IN_TRL = inspect.unwrap(sft_trainer.SFTTrainer.compute_loss).__code__.co_names

one_term = pytest.mark.skipif(
    "aux_loss_coef" in IN_TRL, reason="0.23.0 adds the term a second time, which ranks do not multiply"
)


def step_of(**attributes: Any) -> Any:
    return SftMoeStep(sft_trainer, COEFFICIENT, **attributes)


def share_of(step: Any, micro_batches: int = 4, *, items: int | None = 12, model: Any = None) -> float:
    """Return the weight of the auxiliary loss in a micro-batch, by that in the only one of a step on one rank."""
    trainer = step.trainer
    before = (trainer.accelerator.num_processes, trainer.args.average_tokens_across_devices)
    trainer.current_gradient_accumulation_steps = 1
    trainer.accelerator.num_processes, trainer.args.average_tokens_across_devices = 1, True
    _, alone = step.weights(model=model)
    trainer.current_gradient_accumulation_steps = micro_batches
    trainer.accelerator.num_processes, trainer.args.average_tokens_across_devices = before
    _, one_of_many = step.weights(items=items, model=model)
    return one_of_many / alone


def test_each_micro_batch_of_each_trainer_has_its_share() -> None:
    steps = [step_of() for _ in range(2)]
    for micro_batches in (4, 4, 2, 4):
        for step in steps:
            assert share_of(step, micro_batches) == pytest.approx(1 / micro_batches)


def test_the_last_step_of_an_epoch_may_have_fewer_micro_batches() -> None:
    step = step_of(current_gradient_accumulation_steps=3)
    step.trainer.args.gradient_accumulation_steps = 4
    step.weights()
    assert tiny.acts(ID, TARGET, step.trainer) == 1
    assert share_of(step, 3) == pytest.approx(1 / 3)


def test_an_early_transformers_divides_by_the_setting() -> None:
    step = step_of()
    alone = step.weights()[1]
    del step.trainer.current_gradient_accumulation_steps
    step.trainer.args.gradient_accumulation_steps = 4
    assert step.weights()[1] / alone == pytest.approx(1 / 4)


def test_the_cross_entropy_keeps_its_weight() -> None:
    step = step_of()
    alone, _ = step.weights()
    step.trainer.current_gradient_accumulation_steps = 4
    assert step.weights()[0] == alone


@pytest.mark.parametrize("fails", [False, True], ids=["returned", "raised"])
def test_the_coefficients_are_the_same_afterwards(fails: bool) -> None:
    step = step_of(current_gradient_accumulation_steps=4)
    step.model.config = SimpleNamespace(router_aux_loss_coef=COEFFICIENT)
    if fails:
        step.coefficient = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            step.weights()
    else:
        step.weights()
    owners = (step.model, step.model.config, step.trainer)
    assert [owner.router_aux_loss_coef for owner in owners] == [COEFFICIENT] * 3
    assert step.trainer.aux_loss_coef == COEFFICIENT


@one_term
@pytest.mark.parametrize(("micro_batches", "share"), [(4, 1 / 4), (1, 1)])
def test_the_ranks_whose_losses_are_added_up_share_it_too(micro_batches: int, share: float) -> None:
    step = step_of()
    step.trainer.accelerator.num_processes = 2
    assert share_of(step, micro_batches) == pytest.approx(share)


def test_ranks_with_a_count_of_their_own_are_averaged_already() -> None:
    step = step_of()
    step.trainer.accelerator.num_processes, step.trainer.args.average_tokens_across_devices = 2, False
    assert share_of(step) == pytest.approx(1 / 4)


def without_a_count(step: Any) -> dict[str, Any]:
    return {"items": None}


def in_parallel(step: Any) -> dict[str, Any]:
    step.trainer.accelerator.parallelism_config = SimpleNamespace(sp_backend="", sp_enabled=True)
    return {}


def divided_by_trainer(step: Any) -> dict[str, Any]:
    step.trainer.model_accepts_loss_kwargs = False
    return {}


def in_evaluation(step: Any) -> dict[str, Any]:
    step.model.eval()
    return {}


def one_micro_batch(step: Any) -> dict[str, Any]:
    return {"micro_batches": 1}


@pytest.mark.parametrize("change", [without_a_count, in_parallel, divided_by_trainer, in_evaluation, one_micro_batch])
def test_a_loss_that_is_not_added_up_keeps_the_whole_term(change: Callable[[Any], dict[str, Any]]) -> None:
    step = step_of()
    options = change(step)
    step.trainer.current_gradient_accumulation_steps = options.get("micro_batches", 4)
    step.weights(items=options.get("items", 12))
    assert tiny.acts(ID, TARGET, step.trainer) == 0
    assert step.model.router_aux_loss_coef == COEFFICIENT
    assert share_of(step, **options) == pytest.approx(1)


class Config(SimpleNamespace):
    def get_text_config(self) -> Any:
        return getattr(self, "text", self)


def inside(inner: Any, forward: Any) -> Any:
    """Return a module that has ``inner`` in a list of layers."""
    outer = torch.nn.Module()
    outer.layers = torch.nn.ModuleList([inner])
    outer.forward = forward
    return outer


def reads(step: Any, owner: Any, name: str) -> None:
    """Have the model read its coefficient there, and nowhere else."""
    setattr(owner, name, 0.25)
    step.coefficient = lambda: getattr(owner, name)
    if owner is not step.model:
        del step.model.router_aux_loss_coef


def wrapped_model(step: Any) -> Any:
    return inside(step.model, step.model.forward)


def config(step: Any) -> Any:
    step.model.config = SimpleNamespace()
    reads(step, step.model.config, "router_aux_loss_coef")
    return step.model


def config_of_a_text_model(step: Any) -> Any:
    step.model.config = Config()
    reads(step, step.model.config, "moe_loss_weight")
    return step.model


def config_of_the_text(step: Any) -> Any:
    step.model.config = Config(text=SimpleNamespace())
    reads(step, step.model.config.text, "aux_loss_coef")
    return step.model


def layer(step: Any) -> Any:
    inner = torch.nn.Identity()
    inner.config = SimpleNamespace()
    reads(step, inner, "moe_loss_weight")
    return inside(inner, step.model.forward)


def layer_with_the_config_of_the_model(step: Any) -> Any:
    inner = torch.nn.Identity()
    model = inside(inner, step.model.forward)
    model.config = inner.config = SimpleNamespace()
    reads(step, inner, "router_aux_loss_coef")
    return model


def config_of_the_model_and_of_a_layer(step: Any) -> Any:
    inner = torch.nn.Identity()
    model = inside(inner, step.model.forward)
    model.config = inner.config = SimpleNamespace()
    reads(step, model.config, "router_aux_loss_coef")
    return model


def config_of_a_wrapped_model(step: Any) -> Any:
    inner = torch.nn.Identity()
    inner.config = SimpleNamespace()
    reads(step, inner.config, "router_aux_loss_coef")
    return inside(inner, step.model.forward)


def of_the_user(step: Any) -> Any:
    """A loss of the user's that reads the coefficient of the trainer, with one that the model declares."""
    trainer = step.trainer
    trainer.compute_loss_func = lambda outputs, labels, **kwargs: (
        outputs.cross_entropy + trainer.aux_loss_coef * outputs.aux_loss
    )
    return step.model


def of_the_user_for_a_model_that_takes_no_count(step: Any) -> Any:
    step.trainer.model_accepts_loss_kwargs = False
    return of_the_user(step)


@pytest.mark.parametrize(
    "place",
    [
        wrapped_model,
        config,
        config_of_a_text_model,
        config_of_the_text,
        layer,
        layer_with_the_config_of_the_model,
        config_of_the_model_and_of_a_layer,
        config_of_a_wrapped_model,
        of_the_user,
        of_the_user_for_a_model_that_takes_no_count,
    ],
)
def test_the_coefficient_is_found_wherever_it_is(place: Callable[[Any], Any]) -> None:
    step = step_of(aux_loss_enabled=False)
    model = place(step)
    assert [share_of(step, model=model) for _ in range(2)] == pytest.approx([1 / 4] * 2)


def test_it_is_found_again_in_a_new_config() -> None:
    step = step_of(aux_loss_enabled=False)
    config(step)
    assert share_of(step) == pytest.approx(1 / 4)
    step.model.config = Config(text=SimpleNamespace(aux_loss_coef=0.25))
    step.coefficient = lambda: step.model.config.text.aux_loss_coef
    assert share_of(step) == pytest.approx(1 / 4)


def test_it_is_found_again_when_its_layer_has_moved() -> None:
    step = step_of(aux_loss_enabled=False)
    model = layer(step)
    (inner,) = model.layers
    assert share_of(step, model=model) == pytest.approx(1 / 4)
    model.layers[0] = torch.nn.Sequential(inner)
    assert share_of(step, model=model) == pytest.approx(1 / 4)
    model.layers = torch.nn.Sequential()
    model.layer = inner
    assert share_of(step, model=model) == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("enabled", "routed", "warnings"),
    [(True, True, 1), (True, False, 1), (False, True, 1), (False, False, 0), (None, True, 1), (None, False, 0)],
)
def test_a_coefficient_that_is_not_found_gives_one_warning(enabled: bool | None, routed: bool, warnings: int) -> None:
    if (enabled is None) is ("aux_loss_enabled" in IN_TRL):
        pytest.skip("trainers of this release have such an attribute, or none has")
    for _ in range(2):
        step = step_of(current_gradient_accumulation_steps=4, aux_loss_enabled=enabled)
        if enabled is None:
            del step.trainer.aux_loss_enabled
        if routed:
            step.model.config = SimpleNamespace(output_router_logits=True)
        del step.model.router_aux_loss_coef
        step.coefficient = lambda: COEFFICIENT
        with recorded_warnings() as messages:
            weights = [step.weights() for _ in range(2)]
        assert weights[0] == weights[1]
        assert ["over 4 micro-batches" in message for message in messages] == [True] * warnings
        assert tiny.acts(ID, TARGET, step.trainer) == 0


def test_trl_adds_the_whole_term_in_each_micro_batch(switch: Any) -> None:
    with switch.off():
        assert share_of(step_of()) == pytest.approx(1)


@one_term
def test_trl_multiplies_it_by_the_ranks(switch: Any) -> None:
    step = step_of()
    step.trainer.accelerator.num_processes = 2
    with switch.off():
        assert share_of(step) == pytest.approx(2)
