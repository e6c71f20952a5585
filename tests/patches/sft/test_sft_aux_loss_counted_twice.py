"""The auxiliary loss of a mixture of experts has the weight that the model gives it, and is logged, in each call.

The derivatives of the model's loss by cross-entropy and auxiliary loss are 1 and the coefficient. The latter loss is 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trl.trainer import sft_trainer

from trl_hotfix.testing import SftMoeStep

import tiny

ID, TARGET = "sft-aux-loss-counted-twice", "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
COEFFICIENT, AUX_LOSS = 0.5, 2.0


def step_of(coefficient: float = COEFFICIENT, **attributes: Any) -> Any:
    return SftMoeStep(sft_trainer, coefficient, **{"model_accepts_loss_kwargs": False, **attributes})


def logged(step: Any) -> dict[str, list[float]]:
    """Return what is logged of the auxiliary loss in each mode."""
    metrics = step.trainer._metrics
    return {mode: getattr(metrics[mode]["aux_loss"], "entries", []) for mode in ("train", "eval")}


def acts(step: Any) -> int | None:
    return tiny.acts(ID, TARGET, step.trainer)


def by_cross_entropy(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    return outputs.cross_entropy


without_labels = pytest.mark.parametrize("name", ["compute_loss_func", "label_smoother"])
"""With either of the two the model gets no labels, and adds nothing itself."""


def test_each_micro_batch_of_each_trainer_counts_it_once() -> None:
    steps = [step_of() for _ in range(2)]
    for calls in range(1, 4):
        for step in steps:
            assert step.weights(items=None) == (1.0, COEFFICIENT)
            assert logged(step) == {"train": [AUX_LOSS] * calls, "eval": []}
            assert acts(step) == calls


def test_trl_counts_it_twice(switch: Any) -> None:
    step = step_of()
    with switch.off():
        assert step.weights(items=None) == (1.0, 2 * COEFFICIENT)
        assert logged(step)["train"] == [COEFFICIENT * AUX_LOSS]


def test_an_evaluation_counts_it_once() -> None:
    step = step_of()
    step.model.eval()
    for calls in (1, 2):
        assert step.weights(items=None) == (1.0, COEFFICIENT)
        assert logged(step) == {"train": [], "eval": [AUX_LOSS] * calls}


@pytest.mark.parametrize("items", [None, 12])
def test_the_count_of_the_tokens_is_handed_on(items: int | None) -> None:
    step, given = step_of(model_accepts_loss_kwargs=True), []
    forward = step.model.forward

    def recording(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        given.append(num_items_in_batch)
        return forward(*args, **kwargs)

    step.model.forward = recording
    assert step.weights(items=items)[1] == COEFFICIENT
    assert given == [items]


@pytest.mark.parametrize("return_outputs", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_outputs_are_returned_to_who_asks(by_name: bool, return_outputs: bool) -> None:
    step = step_of()
    tokens = torch.tensor([[1, 2, 3, 4]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    if by_name:
        result = step.trainer.compute_loss(model=step.model, inputs=inputs, return_outputs=return_outputs)
    else:
        result = step.trainer.compute_loss(step.model, inputs, return_outputs)
    assert isinstance(result, tuple) == return_outputs
    loss = result[0] if return_outputs else result
    assert float(loss.detach()) == 3.0 + COEFFICIENT * AUX_LOSS
    if return_outputs:
        assert float(result[1].aux_loss.detach()) == AUX_LOSS


def test_a_coefficient_of_0_is_no_error_and_logged(switch: Any) -> None:
    step = step_of(0.0)
    assert step.weights(items=None) == (1.0, 0.0)
    assert logged(step)["train"] == [AUX_LOSS]
    with switch.off(), pytest.raises(UnboundLocalError):
        step.weights(items=None)


@without_labels
def test_without_labels_the_term_is_trls(name: str, switch: Any) -> None:
    given: dict[str, Any] = {name: by_cross_entropy}
    step = step_of(**given)
    assert step.weights(items=None) == (1.0, COEFFICIENT)
    assert logged(step)["train"] == [COEFFICIENT * AUX_LOSS]
    assert acts(step) == 0
    with switch.off():
        assert step.weights(items=None) == (1.0, COEFFICIENT)
    assert logged(step)["train"] == [COEFFICIENT * AUX_LOSS] * 2


@without_labels
def test_without_labels_a_coefficient_of_0_is_no_error(name: str) -> None:
    step = step_of(0.0, **{name: by_cross_entropy})
    assert step.weights(items=None) == (1.0, 0.0)
    assert logged(step)["train"] == [AUX_LOSS]


def test_a_trainer_without_the_term_is_trls(switch: Any) -> None:
    step = step_of(aux_loss_enabled=False)
    assert step.weights(items=None) == (1.0, COEFFICIENT)
    assert logged(step) == {"train": [], "eval": []}
    assert acts(step) == 0
    assert step.trainer.aux_loss_enabled is False
    with switch.off():
        assert step.weights(items=None) == (1.0, COEFFICIENT)


def test_liger_counts_it_once_and_logs_nothing() -> None:
    step = step_of()
    step.trainer.args.use_liger_kernel = True
    assert step.weights(items=None) == (1.0, COEFFICIENT)
    assert logged(step)["train"] == []


def test_the_mean_of_all_ranks_is_logged() -> None:
    step = step_of()
    step.trainer.accelerator.gather_for_metrics = lambda value: torch.stack([value, value + 2])
    assert step.weights(items=None) == (1.0, COEFFICIENT)
    assert logged(step)["train"] == [AUX_LOSS + 1]


@pytest.mark.parametrize("fails", [False, True], ids=["returned", "raised"])
def test_the_trainer_is_the_same_after_a_call(fails: bool) -> None:
    step = step_of()
    if fails:
        step.coefficient = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            step.weights(items=None)
    else:
        step.weights(items=None)
    assert step.trainer.aux_loss_enabled is True
    assert step.trainer.aux_loss_coef == step.model.router_aux_loss_coef == COEFFICIENT
