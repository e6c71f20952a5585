"""The stand-ins for the losses of Liger have its arguments, and return what it returns, with the same gradients.

The losses of the package are torch's own operations, which a CPU has. Its kernels in Triton are for ``make gpu``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bench.releases import layout  # noqa: E402
from tiny import liger  # noqa: E402

BETA = 0.3
ROWS, LENGTH, WIDTH, WORDS = 4, 5, 8, 11


@pytest.fixture(scope="module")
def package() -> Iterator[Any]:
    """Return the module of Liger's losses."""
    with losses_of("liger") as module:
        yield module


@contextmanager
def losses_of(overlay: str) -> Iterator[Any]:
    layout.build([layout.main_place(layout.releases()[-1])], beside={overlay})
    folder = str(layout.BENCH / "overlay" / overlay)
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("liger_kernel.chunked_loss")
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
            del sys.modules[name]


def numbers(*shape: int) -> Any:
    return torch.randn(*shape, requires_grad=True)


def inputs() -> dict[str, Any]:
    """Return hidden states and weights of policy and reference, and labels whose first tokens are of the prompt."""
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, (ROWS, LENGTH))
    for row in range(ROWS):
        labels[row, : row % 3] = -100
    reference = {"ref_input": numbers(ROWS, LENGTH, WIDTH).detach(), "ref_weight": numbers(WORDS, WIDTH).detach()}
    return {"_input": numbers(ROWS, LENGTH, WIDTH), "lin_weight": numbers(WORDS, WIDTH), "target": labels, **reference}


def of_generation(**more: Any) -> dict[str, Any]:
    """Return what GRPO gives the loss: no token of the last row is in it."""
    given = inputs()
    mask = (given["target"] != -100).long()
    mask[-1] = 0
    return {
        "_input": given["_input"],
        "lin_weight": given["lin_weight"],
        "selected_token_ids": given["target"].clamp(min=0),
        "attention_mask": mask,
        "advantages": torch.tensor([1.5, -0.5, -2.0, 0.25]),
        **more,
    }


def older_log_probs() -> Any:
    """Return log-probs of an older policy, from which some of the ratios are clipped."""
    torch.manual_seed(1)
    return -3 * torch.rand(ROWS, LENGTH)


def step(loss: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return the loss, what else is returned, and the gradients of the hidden states and of the weights."""
    value, rest = loss(**given)
    return value.detach(), tuple(rest), torch.autograd.grad(value, [given["_input"], given["lin_weight"]])


PREFERENCES = {"preference_labels": torch.tensor([True, False, False, True]), "kl": torch.tensor(0.2)}
CASES: dict[str, tuple[Any, str, dict[str, Any], tuple[Any, ...], Callable[[], dict[str, Any]]]] = {
    "dpo": (liger.dpo_loss, "DPO", {"beta": BETA}, (BETA,), inputs),
    "kto": (
        liger.kto_loss,
        "KTO",
        {"beta": BETA, "use_ref_model": True},
        (BETA,),
        lambda: {**inputs(), **PREFERENCES},
    ),
    **{
        f"grpo, {kind}, {name}": (
            liger.grpo_loss,
            "GRPO",
            {"beta": 0.0, "use_ref_model": False, "loss_type": kind},
            (kind,),
            lambda more=more: of_generation(**more),
        )
        for kind in ("dapo", "bnpo")
        for name, more in {
            "first step": {},
            "second step": {"old_per_token_logps": older_log_probs()},
            "counted": {"num_items_in_batch": torch.tensor(23)},
        }.items()
    },
}
"""The stand-in, the name of the loss, the settings of the loss, those of the stand-in, and what both are given."""


@pytest.mark.parametrize("case", CASES)
def test_the_stand_in_returns_what_liger_returns(package: Any, case: str) -> None:
    stand_in, name, settings, given_first, make = CASES[case]
    fused = getattr(package, f"LigerFusedLinear{name}Loss")(compiled=False, **settings)
    given = make()
    loss, rest, gradients = step(lambda **inputs: stand_in(*given_first, **inputs), given)
    right, right_rest, right_gradients = step(fused, given)
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(gradients, right_gradients)
    if name != "GRPO":  # whose stand-in has no metrics
        for part, right_part in zip(rest, right_rest, strict=True):
            torch.testing.assert_close(part, torch.as_tensor(right_part), check_dtype=False)


@pytest.mark.parametrize(
    ("stand_in", "name"), [(liger.dpo_loss, "DPO"), (liger.kto_loss, "KTO"), (liger.grpo_loss, "GRPO")]
)
def test_the_stand_in_takes_what_liger_takes(package: Any, stand_in: Any, name: str) -> None:
    forward = getattr(package, f"LigerFusedLinear{name}Loss").forward
    theirs = [parameter for parameter in inspect.signature(forward).parameters if parameter != "self"]
    ours = list(inspect.signature(stand_in).parameters.values())[1:]
    if any(parameter.kind is parameter.KEYWORD_ONLY for parameter in ours):
        assert {parameter.name for parameter in ours} <= set(theirs)
    else:
        assert [parameter.name for parameter in ours] == theirs


def distilled(overlay: str, labels: Any, chosen: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the loss and the gradients of the ``chosen`` positions of a student and its teacher."""
    torch.manual_seed(0)
    student, weight, teacher = numbers(ROWS, LENGTH, WIDTH), numbers(WORDS, WIDTH), numbers(ROWS, LENGTH, WIDTH)
    with losses_of(overlay) as package:
        fused = package.LigerFusedLinearJSDLoss(compiled=False, beta=BETA)
        loss = fused(student[chosen], weight, teacher[chosen].detach(), weight.detach() ** 3, labels[chosen])
    return loss.detach(), torch.autograd.grad(loss, [student, weight])


def test_positions_with_a_label_alone_give_the_loss_that_liger_has_been_giving_since_0_6_5() -> None:
    labels = inputs()["target"]
    right = distilled("liger", labels, ...)
    torch.testing.assert_close(distilled("liger-0.6.4", labels, labels != -100), right)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(distilled("liger-0.6.4", labels, ...), right)
