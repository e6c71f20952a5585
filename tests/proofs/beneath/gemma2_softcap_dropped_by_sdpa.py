"""Train two steps of two micro-batches of a Gemma 2 as transformers loads it, with SFT, DPO and GRPO, and evaluate.

Each says so, once. With the option the weights, gradients and losses of all steps, and the evaluations, are those of
the same run with eager attention from the beginning, whose logits have the cap: that is compared with a formula.
"""

from __future__ import annotations

import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range
from trl_hotfix.patching import engine

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "gemma2-softcap-dropped-by-sdpa"
OVERLAYS = ()
PARITY = False
VARIANTS = "It changes nothing that is computed unless an option says so."

METHODS = ("SFT", "DPO", "GRPO")
CAP = 0.5


def train() -> tiny.TrainingResult:
    from importlib import metadata

    import transformers

    if in_range(metadata.version("trl"), "<0.24.0"):
        return tiny.TrainingResult(absent("the trainers have no base in TRL, and the patch is not for them"))
    if not in_range(transformers.__version__, ">=4.57,<5.21"):
        return tiny.TrainingResult(absent("this transformers takes eager attention, or says that it should be"))
    assert_eager_caps()
    patched = trl_hotfix.status()[ID].state.value == "applied"
    said, runs = 0, {}
    for method in METHODS:
        runs[method], lines = trained(method)
        assert len(lines) == patched, (method, lines)
        said += len(lines)
    for method in METHODS if patched else ():
        expected, lines = trained(method, "eager")
        assert not lines, (method, lines)
        assert not same(runs[method], expected), f"{method}: there is no cap to drop"
        with engine.ENGINE.patched((ID,), True, {ID: {"attention": "eager"}}, unknown_body="try"):
            capped, lines = trained(method)
        assert not lines, (method, lines)
        assert same(capped, expected), f"{method}: the model is not trained as with eager attention"
    return tiny.result_of_runs(runs, judge(said, right=len(METHODS), wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Train with eager attention, and without a cap."""
    runs, kinds = {}, {"eager": ("eager", CAP), "no cap": (None, None)}
    for method in METHODS:
        for kind, settings in kinds.items():
            runs[f"{method} {kind}"], lines = trained(method, *settings)
            assert not lines, (method, kind, lines)
    return tiny.result_of_runs(runs, absent("no cap is dropped"))


def gemma2(folder: str, cap: float | None, attention: str | None) -> Any:
    """Return a Gemma 2 of two layers, from disk."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        attn_logit_softcapping=cap,
        query_pre_attn_scalar=8,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Gemma2ForCausalLM(config).save_pretrained(f"{folder}/gemma2")
    chosen = {} if attention is None else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_pretrained(f"{folder}/gemma2", **chosen)


def assert_eager_caps() -> None:
    """Compare what eager attention looks at with the softmax of the capped scores."""
    import torch
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    layer: Any = torch.nn.Module()
    layer.num_key_value_groups, layer.head_dim = 1, 2
    q, k, v = torch.randn(3, 1, 1, 4, 2, generator=torch.Generator().manual_seed(0))
    _, found = eager_attention_forward(layer, q, k, v, None, scaling=1.0, softcap=CAP)
    expected = (CAP * torch.tanh(q @ k.mT / CAP)).softmax(-1)
    assert torch.allclose(found, expected, atol=1e-6)


def same(one: Any, other: Any) -> bool:
    """Return whether the weights before each step and in the end, the gradients and all losses are equal."""
    steps = zip(one.steps, other.steps, strict=True)
    pairs = [(getattr(left, name), getattr(right, name)) for left, right in steps for name in ("weights", "gradients")]
    pairs.append((one.model.state_dict(), other.model.state_dict()))
    losses = [
        [part.loss for step in run.steps for part in step.micro_batches] + [part.loss for part in run.evaluations]
        for run in (one, other)
    ]
    return losses[0] == losses[1] and all(
        left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left) for left, right in pairs
    )


def trained(method: str, attention: str | None = None, cap: float | None = CAP) -> tuple[Any, list[str]]:
    """Train, and return the trainer and what trl_hotfix says of the cap."""
    import torch
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)
    recorder = tiny.stepwise(trainer_class)
    settings: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    with tempfile.TemporaryDirectory() as folder:
        model = gemma2(folder, cap, attention)

        def run() -> Any:
            torch.manual_seed(0)
            if method == "GRPO":
                trainer = tiny.grpo(recorder, model, config_class, prompts=["w1 w2 w3"] * 16, **settings)
                trainer.train()
                return trainer
            data = (
                Dataset.from_list([{"text": words(number, 3 + number)} for number in range(8)])
                if method == "SFT"
                else preferences_of_several_lengths()
            )
            trainer = tiny.trainer(
                recorder,
                model=model,
                args=tiny.config(config_class, max_length=32, **settings),
                train_dataset=data,
                eval_dataset=data.select(range(2)),
                tokenizer=tiny.tokenizer(),
                **({"ref_model": gemma2(folder, cap, attention)} if method == "DPO" else {}),
            )
            trainer.train()
            trainer.evaluate()
            return trainer

        trainer, lines = tiny.warnings_of(run)
    return trainer, [line for line in lines if "soft cap" in line]
