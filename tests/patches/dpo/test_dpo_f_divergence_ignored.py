"""The loss of DPO is that of the divergence, given as a member of the enumeration or as its text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer
from trl.trainer.dpo_trainer import DPOConfig, FDivergenceType

from trl_hotfix.testing import dpo_stub

BETA, ALPHA = 0.5, 0.25
DIVERGENCES = ("reverse_kl", "js_divergence", "alpha_divergence")
MICRO_BATCHES = ((0, 0, 2), (0, 1, 4), (1, 0, 3), (1, 2, 4), (2, 0, 1))
"""The step of each, and the first and the last of its pairs."""

POLICY = [[-2.0, -1.5, -3.25, -0.5], [-2.5, -3.0, -1.0, -4.0]]
REFERENCE = [[-3.0, -1.0, -2.0, -2.75], [-2.0, -4.5, -1.5, -0.5]]
"""Log-probs of four chosen and four rejected completions."""

each_divergence = pytest.mark.parametrize("name", DIVERGENCES)


def config_makes_texts() -> bool:
    post_init = vars(DPOConfig).get("__post_init__")
    return post_init is not None and "value" in post_init.__code__.co_names


def loss_asks_for_texts() -> bool:
    return "value" in inspect.unwrap(dpo_trainer.DPOTrainer.dpo_loss).__code__.co_names


def of_config(name: str) -> Any:
    """Return what the config has if a member of ``FDivergenceType`` is given to it."""
    return name if config_makes_texts() else FDivergenceType(name)


def as_compared(name: str) -> Any:
    """Return what ``dpo_loss`` compares with."""
    return name if loss_asks_for_texts() else FDivergenceType(name)


def stub(divergence: Any, **attributes: Any) -> Any:
    return dpo_stub(
        dpo_trainer,
        model=torch.nn.Linear(1, 1),
        state=SimpleNamespace(global_step=0),
        f_divergence_type=divergence,
        f_divergence_params={"alpha_divergence_coef": ALPHA},
        beta=BETA,
        loss_type="sigmoid",
        label_smoothing=0.0,
        reference_free=False,
        **attributes,
    )


def log_probs(first: int = 0, last: int = 4) -> tuple[list[Any], list[Any]]:
    policy = [torch.tensor(values[first:last], requires_grad=True) for values in POLICY]
    return policy, [torch.tensor(values[first:last]) for values in REFERENCE]


def with_gradients(losses: Any, policy: list[Any]) -> Any:
    """Return the loss of each pair and its derivatives by the log-probs of the policy, in one tensor."""
    return torch.cat([losses.detach(), *torch.autograd.grad(losses.sum(), policy)])


def measured(trainer: Any, first: int = 0, last: int = 4, **kwargs: Any) -> Any:
    policy, reference = log_probs(first, last)
    return with_gradients(trainer.dpo_loss(*policy, *reference, **kwargs)[0], policy)


def expected(name: str, first: int = 0, last: int = 4, of_margin: Callable[[Any], Any] | None = None) -> Any:
    """Return what the formula gives, from the logarithm of u, the ratio of policy and reference."""
    policy, reference = log_probs(first, last)
    chosen, rejected = (of_policy - of_reference for of_policy, of_reference in zip(policy, reference, strict=True))
    scores: dict[str, Callable[[Any], Any]] = {
        "reverse_kl": lambda log_u: log_u,
        "js_divergence": lambda log_u: log_u + torch.log(torch.tensor(2.0)) - torch.log1p(log_u.exp()),
        "alpha_divergence": lambda log_u: (1 - (-ALPHA * log_u).exp()) / ALPHA,
    }
    margin = BETA * (scores[name](chosen) - scores[name](rejected))
    losses = of_margin(margin) if of_margin else -torch.nn.functional.logsigmoid(margin)
    return with_gradients(losses, policy)


@each_divergence
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_each_micro_batch_has_the_loss_of_its_divergence(name: str, training: bool) -> None:
    trainer = stub(of_config(name))
    trainer.model.train(training)
    for step, first, last in MICRO_BATCHES:
        trainer.state.global_step = step
        torch.testing.assert_close(measured(trainer, first, last), expected(name, first, last))


def test_each_trainer_has_the_loss_of_its_own_divergence() -> None:
    trainers = {name: stub(of_config(name)) for name in DIVERGENCES}
    for _ in range(2):
        for name, trainer in trainers.items():
            torch.testing.assert_close(measured(trainer), expected(name))


@each_divergence
def test_what_the_loss_compares_with_has_its_effect(name: str) -> None:
    torch.testing.assert_close(measured(stub(as_compared(name))), expected(name))


@each_divergence
def test_trl_has_the_loss_of_the_reverse_kl(name: str, switch: Any) -> None:
    with switch.off():
        trainer = stub(of_config(name))
        for _, first, last in MICRO_BATCHES:
            torch.testing.assert_close(measured(trainer, first, last), expected("reverse_kl", first, last))


@each_divergence
def test_the_trainer_keeps_what_it_was_given_also_after_an_error(name: str) -> None:
    given = of_config(name)
    trainer = stub(given)
    measured(trainer)
    assert trainer.f_divergence_type is given
    with pytest.raises(AttributeError):
        trainer.dpo_loss(None, None, None, None)
    assert trainer.f_divergence_type is given


@pytest.mark.parametrize("given", [of_config("reverse_kl"), *map(as_compared, DIVERGENCES)], ids=str)
def test_a_divergence_that_has_its_effect_is_not_replaced(given: Any) -> None:
    trainer = stub(given)
    del trainer.f_divergence_type
    # It cannot be set.
    type(trainer).f_divergence_type = property(lambda self: given)
    torch.testing.assert_close(measured(trainer), expected(getattr(given, "value", given)))


def test_another_loss_is_handed_on() -> None:
    if "loss_type" not in inspect.signature(dpo_trainer.DPOTrainer.dpo_loss).parameters:
        pytest.skip("the loss of this release takes its type from the trainer")
    hinge = expected("js_divergence", of_margin=lambda margin: torch.relu(1 - margin))
    trainer = stub(of_config("js_divergence"))
    torch.testing.assert_close(measured(trainer, loss_type="hinge", model_output={}), hinge)


def test_an_unknown_text_is_an_error_where_members_are_compared() -> None:
    if loss_asks_for_texts():
        pytest.skip("this release compares texts")
    with pytest.raises(ValueError, match="no_divergence"):
        measured(stub("no_divergence"))
