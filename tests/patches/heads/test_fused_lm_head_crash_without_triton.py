"""Tokens are scored in torch by the formula of the kernel where Triton does not run, and by TRL's kernel elsewhere."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import utils

from trl_hotfix import witness
from trl_hotfix.authoring import Call
from trl_hotfix.patches.heads.fused_lm_head_crash_without_triton import score_in_torch
from trl_hotfix.testing import tiny_attention_model

ID = "fused-lm-head-crash-without-triton"
SCORES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""In the order of the kernel. The last three have no gradient."""

IDS = ([7, 3, 6, 2], [3, 4, 5, 6])
LABELS = ([7, 3, -100, 2], [3, 4, 5, 6])


class KernelIsCalled(Exception):
    pass


class Kernel:
    @staticmethod
    def apply(*args: Any) -> None:
        raise KernelIsCalled


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the module as it is imported where there is no Triton."""
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", None)


class Case:
    """A Llama with TRL's head, and by torch what the head is to give for its rows.

    ``settings`` are of the config, ``options`` of the head. ``labels`` is ``(batch, length)``, as ``ids`` is.
    """

    def __init__(
        self,
        settings: Mapping[str, float] | None = None,
        *,
        bias: bool = False,
        dtype: Any = torch.float32,
        ids: Any = IDS,
        labels: Any = LABELS,
        with_head: bool = True,
        **options: Any,
    ) -> None:
        self.model = tiny_attention_model().to(dtype)
        vars(self.model.config).update(settings or {})
        if bias:
            weight = self.model.lm_head.weight
            self.model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(weight)).to(weight.dtype))
        self.options: dict[str, Any] = {"temperature": 1.0, "cast_lm_head_to_fp32": False, "outputs": SCORES, **options}
        self.ids, self.labels = torch.tensor(ids), torch.tensor(labels)
        # It would return the same as TRL's head for labels, and is asked for logits alone.
        self.own_forward = self.model.forward
        if with_head:
            self.add_head()

    def add_head(self) -> None:
        utils.add_fused_lm_head(self.model, **self.options)

    def scores(self) -> dict[str, Any]:
        """Return what the head gives for the labels, each score ``(labels,)`` or None."""
        outputs = self.model(input_ids=self.ids, labels=self.labels, fused_lm_head=True)
        mask = self.labels[:, 1:] != -100
        found = {name: getattr(outputs, name) for name in SCORES}
        return {name: None if value is None else value[mask] for name, value in found.items()}

    def expected(self) -> dict[str, Any]:
        """Return the same by the formulas that TRL's ``FusedCausalLMOutput`` documents."""
        config, head = self.model.config, self.model.lm_head
        hidden = self.model.base_model(input_ids=self.ids).last_hidden_state[:, :-1]
        weight, bias = head.weight, head.bias
        if self.options["cast_lm_head_to_fp32"]:
            hidden, weight, bias = hidden.float(), weight.float(), bias.float()
        elif torch.is_autocast_enabled("cpu"):
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        mask = self.labels[:, 1:] != -100
        with torch.autocast("cpu", enabled=False):
            logits = torch.nn.functional.linear(hidden[mask], weight, bias).float()
        logits = logits * getattr(config, "logit_scale", 1.0)
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits / self.options["temperature"]
        targets, probabilities = self.labels[:, 1:][mask], logits.softmax(-1)
        scores = {
            "log_probs": torch.log(probabilities[range(len(targets)), targets]),
            "entropy": -(probabilities * probabilities.log()).sum(-1),
            "log_sum_sq_probs": torch.log((probabilities**2).sum(-1)).detach(),
            "mean_logits": logits.mean(-1).detach(),
            "is_top1": logits.argmax(-1) == targets,
        }
        return {name: scores[name] if name in self.options["outputs"] else None for name in SCORES}

    def assert_scores(self, *, tolerance: float = 1e-5) -> None:
        """Assert that the scores and their gradients are right, gradients within a part of the largest one."""
        found, expected = self.scores(), self.expected()
        parameters = list(self.model.parameters())
        for name, right in expected.items():
            value = found[name]
            assert (value is None) is (right is None), name
            if right is None:
                continue
            torch.testing.assert_close(
                value.float(), right.float(), atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert value.requires_grad is right.requires_grad, name
            if right.requires_grad:
                of_value, of_right = (
                    torch.autograd.grad((scores**2).sum(), parameters, retain_graph=True, allow_unused=True)
                    for scores in (value, right)
                )
                for gradient, right_gradient in zip(of_value, of_right, strict=True):
                    assert (gradient is None) is (right_gradient is None), name
                    if right_gradient is not None:
                        difference = (gradient - right_gradient).abs().max()
                        assert difference <= tolerance * (1 + right_gradient.abs().max()), name


CAPPED: Mapping[str, float] = {"final_logit_softcapping": 0.5, "logit_scale": 3.0}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        (CAPPED, {"temperature": 0.7}),
        ({"logit_scale": 0.5}, {"bias": True}),
        ({}, {"bias": True, "temperature": 2.0}),
    ],
    ids=["plain", "capped", "scaled", "with a bias"],
)
def test_scores_and_gradients_are_those_of_the_formula(settings: Mapping[str, float], options: dict[str, Any]) -> None:
    Case(settings, **options).assert_scores()


@pytest.mark.parametrize("name", SCORES)
def test_a_head_gives_the_scores_that_it_is_asked_for(name: str) -> None:
    Case(outputs=("log_probs",) if name == "log_probs" else ("log_probs", name)).assert_scores()


def test_the_head_of_a_model_in_bfloat16_is_computed_in_float32_if_that_is_asked_for() -> None:
    # bfloat16 has 8 bits, and a gradient goes through several roundings.
    Case(bias=True, dtype=torch.bfloat16, cast_lm_head_to_fp32=True).assert_scores(tolerance=0.05)


def test_a_model_in_bfloat16_has_logits_in_bfloat16() -> None:
    Case(dtype=torch.bfloat16).assert_scores(tolerance=0.05)


def test_autocast_computes_the_logits_in_its_type() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        Case().assert_scores(tolerance=0.05)


def test_a_bias_in_float32_fits_autocast() -> None:
    case = Case(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(value.isfinite().all() for value in case.scores().values())


def test_a_batch_without_labels_has_a_gradient_of_0() -> None:
    case = Case(labels=[[-100] * 4] * 2)
    case.assert_scores()
    loss = case.model(input_ids=case.ids, labels=case.labels, fused_lm_head=True).loss
    (gradient,) = torch.autograd.grad(loss, case.model.lm_head.weight)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("rows", [52, 60])
def test_a_large_batch_is_scored_in_parts(rows: int) -> None:
    # Of 20 labels each.
    ids = [[(row * place + 3 * place + row) % 16 for place in range(21)] for row in range(rows)]
    Case(CAPPED, ids=ids, labels=ids).assert_scores(tolerance=1e-4)


def test_an_evaluation_has_the_scores_of_training() -> None:
    case = Case(CAPPED)
    in_training = case.scores()
    case.model.eval()
    with torch.no_grad():
        for name, value in case.scores().items():
            torch.testing.assert_close(value, in_training[name].detach())
            assert not value.requires_grad


def test_each_of_two_models_is_scored_with_its_own_head() -> None:
    cases = [Case(temperature=0.5), Case(CAPPED, bias=True)]
    for case in cases + cases:
        case.assert_scores()


def test_without_the_head_the_logits_are_those_of_the_model() -> None:
    case = Case()
    assert case.model(input_ids=case.ids).logits.equal(case.own_forward(input_ids=case.ids).logits)


def test_generate_reads_the_signature_of_the_models_own_forward() -> None:
    case = Case()
    assert inspect.signature(case.model.forward) == inspect.signature(case.own_forward)


def test_the_module_is_left_as_it_is() -> None:
    Case().scores()
    assert utils._ChunkedLogProbFunction is None


@pytest.mark.parametrize(
    ("cuda", "xpu", "interpreter", "runs"),
    [
        (False, None, None, False),
        (True, None, None, True),
        (False, True, None, True),
        (False, False, "0", False),
        (False, False, "1", True),
    ],
)
def test_trls_kernel_is_called_where_triton_runs(
    cuda: bool, xpu: bool | None, interpreter: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Kernel)
    case, before = Case(with_head=False), witness.totals().get(ID, witness.Count())
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: cuda)
        there.delattr(torch, "xpu", raising=False)
        if xpu is not None:
            there.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: xpu), raising=False)
        there.delenv("TRITON_INTERPRET", raising=False)
        if interpreter is not None:
            there.setenv("TRITON_INTERPRET", interpreter)
        case.add_head()
    since = witness.totals().get(ID, witness.Count()) - before
    assert (since.called, since.acted) == (1, not runs)
    if runs:
        with pytest.raises(KernelIsCalled):
            case.scores()
    else:
        case.assert_scores()


def test_the_forward_beneath_that_of_another_patch_is_replaced(switch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def add_in_torch(*args: Any, **options: Any) -> None:
        score_in_torch(Call(beneath_another(add, calls), None, args, options))

    with switch.off(), monkeypatch.context() as there:
        add = utils.add_fused_lm_head
        there.setattr(utils, "add_fused_lm_head", add_in_torch)
        case = Case()
        case.assert_scores()
    assert calls
    assert case.model.forward.__func__.__globals__ is globals()


def beneath_another(add: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    """Return ``add_fused_lm_head`` as another patch has it, which has put a forward of its own around TRL's."""

    @wraps(add)
    def add_beneath(model: Any, *args: Any, **options: Any) -> None:
        add(model, *args, **options)
        fused, others = model.forward.__func__, inspect.cleandoc

        @wraps(fused)
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(len(others("")))
            return fused(*args, **kwargs)

        model.forward = MethodType(forward, model)

    return add_beneath


def test_without_triton_trl_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.find_spec("trl.kernels.chunked_logprob")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="triton"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_trl_cannot_score_without_a_kernel(switch: Any) -> None:
    with switch.off(), pytest.raises(AttributeError, match="'NoneType' object has no attribute 'apply'"):
        Case().scores()
