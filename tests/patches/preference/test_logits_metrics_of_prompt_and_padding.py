"""The logits of prompts and padding do not move the metrics, and nothing else changes, bit by bit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

ID = "logits-metrics-of-prompt-and-padding"
SIDES = ("chosen", "rejected")
ROUTED = SimpleNamespace(config=SimpleNamespace(router_aux_loss_coef=0.5))

methods = pytest.mark.parametrize("method", ["CPO", "ORPO"])
modes = pytest.mark.parametrize("mode", ["train", "eval"])

CHOSEN = [[-100, -100, 5, 6], [-100, 7, 1, -100]]
REJECTED = [[-100, -100, 8, -100, -100], [-100, 3, 4, 9, 1]]
"""Labels of two pairs. The rejected side is the longer one, so the logits of both have its length."""


class Run:
    """One call of ``get_batch_loss_metrics`` of a stand-in with random logits, and what it returned."""

    def __init__(self, method: str, mode: str = "train", *, labels: Any = (CHOSEN, REJECTED), **settings: Any) -> None:
        trainer_class, config_class = tiny.classes(method)
        torch.manual_seed(0)
        length = max(len(rows[0]) for rows in labels)
        self.logits = [torch.randn(2, length, 3, requires_grad=True) for _ in SIDES]
        self.logps = [logits.log_softmax(-1)[..., 0].sum(1) for logits in self.logits]
        names = {"is_encoder_decoder": False, "aux_loss_enabled": False, "aux_loss_coef": 0.5, **settings}
        losses = (torch.tensor(0.5), torch.tensor(0.25)) if names["aux_loss_enabled"] else (torch.tensor(0.5),)
        self.trainer = stub_trainer(trainer_class, default_arguments(config_class), **names)
        self.forward = self.trainer.concatenated_forward = lambda *_: (*self.logps, *self.logits, *losses)
        batch = {f"{side}_labels": torch.tensor(rows) for side, rows in zip(SIDES, labels, strict=True)}
        with tiny.counted(ID) as count:
            self.loss, self.metrics = self.trainer.get_batch_loss_metrics(ROUTED, batch, train_eval=mode)
        self.acts = count().acted
        self.gradients = torch.autograd.grad(self.loss, self.logits)
        self.prefix = "eval_" if mode == "eval" else ""

    def means(self) -> list[float]:
        return [float(self.metrics[f"{self.prefix}logits/{side}"]) for side in SIDES]

    def others(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.metrics.items() if "logits/" not in name}


def mean_of(logits: Any, labels: list[list[int]], *, shift: int = 1) -> float:
    """Return the mean of the logits that predict a token of the completion, one by one."""
    found = [
        logits[row, place - shift].mean()
        for row, ids in enumerate(labels)
        for place, label in enumerate(ids)
        if label != -100
    ]
    return float(torch.stack(found).mean())


@methods
@modes
def test_the_means_are_those_of_the_completions(method: str, mode: str) -> None:
    run = Run(method, mode)
    assert run.means() == pytest.approx([mean_of(*side) for side in zip(run.logits, (CHOSEN, REJECTED), strict=True)])
    assert run.acts == 1


@methods
@modes
@pytest.mark.parametrize("router", [False, True], ids=["dense", "router"])
def test_loss_gradients_and_other_metrics_stay_bit_by_bit(method: str, mode: str, router: bool, switch: Any) -> None:
    states = []

    def run() -> Run:
        found = Run(method, mode, aux_loss_enabled=router)
        states.append((torch.get_rng_state(), random.getstate(), str(np.random.get_state())))
        return found

    random.seed(0)
    np.random.seed(0)
    patched = run()
    with switch.off():
        unpatched = run()
    assert patched.loss.equal(unpatched.loss)
    for one, other in zip(patched.gradients, unpatched.gradients, strict=True):
        assert one.equal(other)
    assert patched.others() == unpatched.others()
    assert patched.metrics.keys() == unpatched.metrics.keys()
    assert {name: type(value) for name, value in patched.metrics.items()} == {
        name: type(value) for name, value in unpatched.metrics.items()
    }
    assert patched.means() != unpatched.means()
    assert states[0][0].equal(states[1][0])
    assert states[0][1:] == states[1][1:]


@methods
def test_trl_has_the_mean_of_all_positions(method: str, switch: Any) -> None:
    with switch.off():
        run = Run(method)
    assert run.means() == pytest.approx([float(logits.detach().mean()) for logits in run.logits])


@methods
def test_the_trainer_has_its_method_again(method: str) -> None:
    run = Run(method)
    assert vars(run.trainer)["concatenated_forward"] is run.forward


@methods
def test_a_decoder_predicts_its_first_token_too(method: str) -> None:
    labels = ([[5, 6, 1], [7, 1, -100]], [[8, 1, -100], [3, 4, 1]])
    run = Run(method, is_encoder_decoder=True, labels=labels)
    expected = [mean_of(logits, rows, shift=0) for logits, rows in zip(run.logits, labels, strict=True)]
    assert run.means() == pytest.approx(expected)
    assert run.acts == 1


@methods
@pytest.mark.parametrize("shorter", ["neither", "chosen", "rejected"])
def test_a_decoder_without_padding_is_left(method: str, shorter: str) -> None:
    full = [[5, 6, 1], [7, 8, 1]]
    labels = [[row[:2] for row in full] if side == shorter else full for side in SIDES]
    run = Run(method, is_encoder_decoder=True, labels=labels)
    assert run.acts == (shorter != "neither")
    assert run.means() == pytest.approx(
        [mean_of(logits, rows, shift=0) for logits, rows in zip(run.logits, labels, strict=True)]
    )


@methods
def test_another_id_may_mark_what_is_no_label(method: str) -> None:
    labels = [[[-1 if label == -100 else label for label in row] for row in rows] for rows in (CHOSEN, REJECTED)]
    run = Run(method, labels=labels, label_pad_token_id=-1)
    assert run.means() == pytest.approx([mean_of(*side) for side in zip(run.logits, (CHOSEN, REJECTED), strict=True)])


def test_half_precision_is_averaged_in_float32() -> None:
    from trl_hotfix.patches.preference.logits_metrics_of_prompt_and_padding import _mean

    logits = torch.randn(4, 600, 8, dtype=torch.bfloat16) + 3
    found = _mean(logits, torch.ones(4, 599, dtype=torch.bool))
    assert found.shape == (1,)
    assert float(found) == pytest.approx(float(logits[:, :599].mean(-1).double().mean()), abs=1e-4)
