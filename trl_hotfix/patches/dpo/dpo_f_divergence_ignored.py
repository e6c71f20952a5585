"""DPO compares its f-divergence with texts where it has a member of an enumeration, or the other way round.

Up to 0.23 ``dpo_loss`` asks whether ``f_divergence_type`` equals ``FDivergenceType.JS_DIVERGENCE.value``, which is a
text. The config declares ``FDivergenceType``, and the command line makes a member of it, which equals no text: the loss
is that of the reverse KL. 0.24.0 makes a member of whatever is given and compares members (pull request 4171). The
config of 0.28.0 makes a text again, which equals no member, so that every divergence is the reverse KL. 0.29.0 has
texts only. The wrappers give the method what it compares with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, judge, module_of
from ...model import Outcome, Verdict
from ...testing import dpo_stub


def compare_the_text(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the loss with the text of the divergence on the trainer (up to 0.23)."""
    divergence = instance.f_divergence_type
    return _with_divergence(getattr(divergence, "value", divergence), wrapped, instance, args, kwargs)


def compare_the_member(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute the loss with the member of the enumeration on the trainer (0.28.0)."""
    member = module_of(wrapped).FDivergenceType(instance.f_divergence_type)
    return _with_divergence(member, wrapped, instance, args, kwargs)


def _with_divergence(
    compared: Any, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = instance.f_divergence_type
    if compared is given or "reverse_kl" in (given, compared):
        return wrapped(*args, **kwargs)
    act()
    instance.f_divergence_type = compared
    try:
        return wrapped(*args, **kwargs)
    finally:
        instance.f_divergence_type = given


_BETA, _ALPHA = 0.5, 0.25


def loss_is_that_of_the_divergence(module: ModuleType) -> Outcome:
    """Judge the losses of the Jensen-Shannon divergence, and then losses and gradients of all three, by the papers.

    Wang et al. 2024 (arXiv:2309.16240) have the derivatives of the divergences.
    """
    if not hasattr(module.DPOTrainer, "dpo_loss"):
        return absent("this release has no dpo_loss")
    divergences = _divergences(module)
    found = _micro_batches(module, divergences["js_divergence"])
    right, wrong = (_expected(name) for name in ("js_divergence", "reverse_kl"))
    outcome = judge(sum(found[0][0]), right=sum(right[0]), wrong=sum(wrong[0]))
    is_fixed = outcome.verdict is Verdict.FIXED
    for name, divergence in divergences.items():
        _compare(name, _micro_batches(module, divergence), _expected(name if is_fixed else "reverse_kl"))
    if is_fixed and _asks_for_texts(module):
        # A text is what dpo_loss asks for.
        for name in divergences:
            _compare(f"the text {name}", _micro_batches(module, name), _expected(name))
    _check_that_an_error_leaves_it(module, divergences["alpha_divergence"])
    return outcome


def _asks_for_texts(module: ModuleType) -> bool:
    return "value" in inspect.unwrap(module.DPOTrainer.dpo_loss).__code__.co_names


def _divergences(module: ModuleType) -> dict[str, Any]:
    """Return what the config has on each divergence if a member of ``FDivergenceType`` is given to it."""
    post_init = vars(module.DPOConfig).get("__post_init__")
    makes_texts = post_init is not None and "value" in post_init.__code__.co_names
    return {kind.value: kind.value if makes_texts else kind for kind in module.FDivergenceType}


_Found = tuple[list[float], list[float]]
"""The loss of each of two pairs, and its derivatives by the log-probs of chosen and rejected completions."""


def _micro_batches(module: ModuleType, divergence: Any) -> list[_Found]:
    """Return what is found of two micro-batches of each of two steps, and of one of the evaluation."""
    import torch

    trainer = dpo_stub(
        module,
        model=torch.nn.Linear(1, 1),
        state=SimpleNamespace(global_step=0),
        f_divergence_type=divergence,
        f_divergence_params={"alpha_divergence_coef": _ALPHA},
        beta=_BETA,
        loss_type="sigmoid",
        label_smoothing=0.0,
        reference_free=False,
    )
    trainer.accelerator.device = torch.device("cpu")
    found = []
    for step, is_training in ((0, True), (0, True), (1, True), (1, True), (1, False)):
        trainer.model.train(is_training)
        trainer.state.global_step = step
        policy, reference = _log_probs()
        losses: torch.Tensor = trainer.dpo_loss(*policy, *reference)[0]
        found.append((losses.tolist(), _derivatives(losses, policy)))
    if trainer.f_divergence_type is not divergence:
        raise AssertionError(f"the trainer had {divergence!r}, and has {trainer.f_divergence_type!r}")
    return found


def _derivatives(losses: Any, log_probs: list[Any]) -> list[float]:
    import torch

    return [value for part in torch.autograd.grad(losses.sum(), log_probs) for value in part.tolist()]


def _log_probs() -> tuple[list[Any], list[Any]]:
    """Return log-probs of two chosen and two rejected completions by the policy, and by the reference."""
    import torch

    policy = [torch.tensor(values, requires_grad=True) for values in ([-2.0, -1.5], [-2.5, -3.0])]
    return policy, [torch.tensor(values) for values in ([-3.0, -1.0], [-2.0, -4.5])]


def _expected(divergence: str) -> _Found:
    """Return what the formula gives, from u, the ratio of policy and reference."""
    import torch

    policy, reference = _log_probs()
    chosen, rejected = (of_policy - of_reference for of_policy, of_reference in zip(policy, reference, strict=True))
    derivatives: dict[str, Callable[[Any], Any]] = {
        "reverse_kl": lambda log_u: log_u,
        "js_divergence": lambda log_u: log_u + torch.log(torch.tensor(2.0)) - torch.log1p(log_u.exp()),
        "alpha_divergence": lambda log_u: (1 - (-_ALPHA * log_u).exp()) / _ALPHA,
    }
    score = derivatives[divergence]
    losses = -torch.nn.functional.logsigmoid(_BETA * (score(chosen) - score(rejected)))
    return losses.tolist(), _derivatives(losses, policy)


def _compare(name: str, found: list[_Found], expected: _Found) -> None:
    for number, micro_batch in enumerate(found):
        for what, values, rights in zip(("losses", "gradients"), micro_batch, expected, strict=True):
            if any(abs(value - right) > 1e-5 for value, right in zip(values, rights, strict=True)):
                raise AssertionError(f"{name}, micro-batch {number}: the {what} are {values}, expected {rights}")


def _check_that_an_error_leaves_it(module: ModuleType, divergence: Any) -> None:
    trainer = dpo_stub(module, f_divergence_type=divergence)
    try:
        trainer.dpo_loss(None, None, None, None)
    except AttributeError:
        pass
    else:
        raise AssertionError("the loss of no log-probs is no error")
    if trainer.f_divergence_type is not divergence:
        raise AssertionError(f"after an error the trainer has {trainer.f_divergence_type!r}")
