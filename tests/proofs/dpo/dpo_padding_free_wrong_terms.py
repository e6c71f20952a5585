"""Train two steps of two micro-batches, and evaluate, with the real DPOTrainer, padding_free and the loss of IPO.

The model is a Llama without its attention, so the sequences of a flattened batch cannot mix, as with FlashAttention on
a GPU. Only the terms that are computed per row remain wrong. Losses and gradients are compared with IPO
(arXiv:2310.12036), those of other settings with padding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent

import tiny
from tiny import dpo_steps
from tiny.grpo_steps import judged_steps, several_runs

ID = "dpo-padding-free-wrong-terms"

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "The adapters are in the attention, which this proof takes out of the model."}


def train() -> tiny.TrainingResult:
    import trl

    if not flattens(trl):
        return tiny.TrainingResult(absent("nothing is flattened"))
    run = steps(ipo, padding_free=True, loss_type="ipo")
    result = run.result
    result.outcome = judged_steps(run)
    if not tiny.variant:  # A variant is one more setting by itself: it does not repeat the others.
        check_other_settings(trl, patched=trl_hotfix.status()[ID].state.value == "applied")
    return result


def unaffected() -> tiny.TrainingResult:
    """Train with a loss that has no term per row, and without padding_free."""
    runs = {
        "sigmoid": steps(dpo_steps.reference_or_policy, padding_free=True),
        "padded": steps(ipo, loss_type="ipo"),
    }
    for run in runs.values():
        dpo_steps.assert_right(run)
    return several_runs(runs, absent("no term counts by row, or every sequence has a row"))


def flattens(trl: Any) -> bool:
    forward = getattr(trl.DPOTrainer, "concatenated_forward", None)
    return forward is not None and "padding_free" in inspect.getsource(forward)


def steps(formula: dpo_steps.Formula, **settings: Any) -> tiny.FormulaSteps:
    return dpo_steps.dpo_steps(formula, llama_without_attention, reference=1, **settings)


def llama_without_attention(folder: str, *, seed: int) -> Any:
    """Return a Llama with an attention whose output is 0 and stays 0. Nothing before it is trained."""
    model = tiny.llama(folder, seed=seed)
    for name, parameter in model.named_parameters():
        if "self_attn" in name or "input_layernorm" in name:
            parameter.requires_grad_(False)
            if "o_proj" in name:
                parameter.data.zero_()
    return model


def ipo(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return IPO (equation 17) with log-probs divided by the tokens of their completion, or of all completions."""
    lengths = [batch[f"{side}_attention_mask"].sum(1) for side in ("chosen", "rejected")]
    of_policy = tiny.preference_log_probs(policy, batch, differentiable=True)
    of_reference = tiny.preference_log_probs(reference, batch)

    def loss(divisors: Any) -> Any:
        margins = [chosen / divisors[0] - rejected / divisors[1] for chosen, rejected in (of_policy, of_reference)]
        return ((margins[0] - margins[1] - 1 / (2 * dpo_steps.BETA)) ** 2).mean()

    return {"right": loss(lengths), "wrong": loss([sum(length.sum() for length in lengths)] * 2)}


def check_other_settings(trl: Any, *, patched: bool) -> None:
    """Compare each setting with padding: patched they are equal, else they differ or crash."""

    def differs_by(setting: Mapping[str, Any]) -> float:
        flattened = steps(lambda *_: {}, padding_free=True, **setting)
        return dpo_steps.difference_of_runs(padded(json.dumps(setting)), flattened)

    silent: list[dict[str, Any]] = [{"rpo_alpha": 0.5}]
    if "'sft'" in inspect.getsource(trl.DPOTrainer.dpo_loss):
        silent.append({"loss_type": ["sigmoid", "ipo", "sft"]})
    for setting in silent:
        assert patched == (differs_by(setting) < 1e-6), setting
    for setting in crashing_settings(trl.DPOConfig):
        with contextlib.nullcontext() if patched else raises():
            assert differs_by(setting) < 1e-6, setting


@functools.cache
def padded(setting: str) -> tiny.FormulaSteps:
    """Return the run with padding, which is the same with the patch and without it. ``setting`` is JSON."""
    return steps(lambda *_: {}, **json.loads(setting))


def crashing_settings(config_class: type) -> list[dict[str, Any]]:
    known = {field.name for field in dataclasses.fields(config_class)}
    settings: dict[str, Any] = {"use_weighting": True, "use_logits_to_keep": True, "ld_alpha": 0.5}
    if "use_logits_to_keep" not in known:  # 0.14.0 has another name for it.
        settings["use_num_logits_to_keep"] = True
    return [{name: value} for name, value in settings.items() if name in known]


@contextlib.contextmanager
def raises() -> Any:
    try:
        yield
    except (RuntimeError, IndexError):
        return
    raise AssertionError("nothing was raised")
