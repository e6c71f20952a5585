"""Train and evaluate the real DPOTrainer with padding_free and each setting, and compare with padding.

The model is a Llama without its attention, so the sequences of a flattened batch cannot mix, as with FlashAttention on
a GPU. Only the terms that are computed per row remain wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "dpo-padding-free-wrong-terms"

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "The adapters are in the attention, which this proof takes out of the model."}


def train() -> tiny.TrainingResult:
    import trl

    if not hasattr(trl.DPOTrainer, "concatenated_forward") or "padding_free" not in inspect.getsource(
        trl.DPOTrainer.concatenated_forward
    ):
        return tiny.TrainingResult(absent("nothing is flattened"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    with tempfile.TemporaryDirectory() as folder:

        def run(*, padding_free: bool, **settings: Any) -> tiny.DpoRun:
            models = (without_attention(tiny.llama(folder, seed=seed)) for seed in (0, 1))
            return tiny.dpo_run(*models, padding_free=padding_free, **settings)

        def differs_by(**settings: Any) -> float:
            return run(padding_free=False, **settings).difference(run(padding_free=True, **settings))

        # The default loss has no term that is computed per row.
        assert differs_by() < 1e-5
        padded, flattened = (run(padding_free=padding_free, loss_type="ipo") for padding_free in (False, True))
        models = [without_attention(tiny.llama(folder, seed=seed)) for seed in (0, 1)]
        wrong = ipo_over_all_completions(*models, padded.batch)
        gradient_difference = max(
            float((gradient - flattened.gradients[name]).abs().max()) for name, gradient in padded.gradients.items()
        )
        outcome = judge(flattened.loss, right=padded.loss, wrong=wrong, gradients_differ_by=gradient_difference)
        assert patched == (padded.difference(flattened) < 1e-6)
        if tiny.variant:  # A variant is one more setting by itself: it does not repeat the others.
            return tiny.TrainingResult(outcome, flattened.loss, flattened.gradients)
        for setting in silently_wrong_settings(trl):
            assert patched == (differs_by(**setting) < 1e-6), setting
        for setting in crashing_settings(trl.DPOConfig):
            with contextlib.nullcontext() if patched else raises():
                assert differs_by(**setting) < 1e-6, setting
    return tiny.TrainingResult(outcome, flattened.loss, flattened.gradients)


def without_attention(model: Any) -> Any:
    """Return the model with an attention whose output is 0 and stays 0."""
    for name, parameter in model.named_parameters():
        if "self_attn" in name:
            parameter.requires_grad_(False)
            if "o_proj" in name:
                parameter.data.zero_()
    return model


def ipo_over_all_completions(policy: Any, reference: Any, batch: Any) -> float:
    """Return IPO (arXiv:2310.12036, equation 17) with log-probs divided by the tokens of all completions of a batch."""
    tokens = sum(int(batch[f"{side}_attention_mask"].sum()) for side in ("chosen", "rejected"))
    margins = [
        (chosen - rejected) / tokens
        for chosen, rejected in (tiny.preference_log_probs(model, batch) for model in (policy, reference))
    ]
    return float(((margins[0] - margins[1] - 1 / (2 * 0.5)) ** 2).mean())


def silently_wrong_settings(trl: Any) -> list[dict[str, Any]]:
    settings: list[dict[str, Any]] = [{"rpo_alpha": 0.5}]
    if "'sft'" in inspect.getsource(trl.DPOTrainer.dpo_loss):
        settings.append({"loss_type": ["sigmoid", "ipo", "sft"]})
    return settings


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
