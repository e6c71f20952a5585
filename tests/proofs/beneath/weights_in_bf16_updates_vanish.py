"""Train two steps of two micro-batches of a model that transformers has loaded from a checkpoint in bfloat16.

SFT, DPO and GRPO say so, once each. The same runs with a model in float32 and with an adapter get no line. With the
option the weights, their gradients and the losses are those of the model in float32.
"""

from __future__ import annotations

import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.patching import engine

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "weights-in-bf16-updates-vanish"
OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "_trained: `return [], 0` -> `return [], 1`": "the number is in a line that an engine's weights never get",
    "_trained: `return [], 0` -> `return [], -1`": "the number is in a line that an engine's weights never get",
}
VARIANTS = "It changes nothing that is computed, and its proof trains an adapter too."

METHODS = ("SFT", "DPO", "GRPO")


def train() -> tiny.TrainingResult:
    import torch
    import transformers

    if transformers.__version__.startswith("4."):
        return tiny.TrainingResult(absent("transformers 4 loads weights in float32"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    said, runs = 0, {}
    for method in METHODS:
        runs[method], lines = trained(method, "bfloat16")
        assert {value.dtype for value in runs[method].model.parameters()} == {torch.bfloat16}, method
        assert len(lines) == patched, (method, lines)
        said += len(lines)
    for method in METHODS if patched else ():
        with engine.ENGINE.patched((ID,), True, {ID: {"weights": "float32"}}, unknown_body="try"):
            cast, lines = trained(method, "bfloat16")
        expected, _ = trained(method, "float32")
        assert not lines, (method, lines)
        assert same(cast, expected), f"{method}: the weights are not trained as in float32"
    return tiny.result_of_runs(runs, judge(said, right=len(METHODS), wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Train weights in float32, and an adapter of a model in bfloat16."""
    runs = {}
    for method in METHODS:
        for kind in ("float32", "adapter"):
            runs[f"{method} {kind}"], lines = trained(method, kind)
            assert not lines, (method, kind, lines)
    return tiny.result_of_runs(runs, absent("what is trained is in float32"))


def same(one: Any, other: Any) -> bool:
    """Return whether the weights before each step and in the end, the gradients and the losses are equal."""
    import torch

    steps = zip(one.steps, other.steps, strict=True)
    pairs = [(getattr(left, name), getattr(right, name)) for left, right in steps for name in ("weights", "gradients")]
    pairs.append((one.model.state_dict(), other.model.state_dict()))
    losses = [[part.loss for step in run.steps for part in step.micro_batches] for run in (one, other)]
    return losses[0] == losses[1] and all(
        left.keys() == right.keys()
        and all(left[name].dtype is torch.float32 and left[name].equal(right[name]) for name in left)
        for left, right in pairs
    )


def trained(method: str, kind: str) -> tuple[Any, list[str]]:
    """Train a kind of model, and return the trainer and what trl_hotfix says of its dtype."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    trainer_class, config_class = tiny.classes(method)
    settings: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    with tempfile.TemporaryDirectory() as folder:
        tiny.llama(folder, seed=0).to(torch.bfloat16).save_pretrained(f"{folder}/bf16")
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/bf16")
        if kind == "float32":
            model = model.float()
        arguments = {"peft_config": tiny.lora()} if kind == "adapter" else {}
        # An adapter begins at random.
        torch.manual_seed(0)

        def run() -> Any:
            recorder = tiny.stepwise(trainer_class)
            if method == "GRPO":
                return _train(
                    tiny.grpo(recorder, model, config_class, prompts=["w1 w2 w3"] * 16, **settings, **arguments)
                )
            data = (
                Dataset.from_list([{"text": words(number, 3 + number)} for number in range(8)])
                if method == "SFT"
                else preferences_of_several_lengths()
            )
            return _train(
                tiny.trainer(
                    recorder,
                    model=model,
                    args=tiny.config(config_class, max_length=32, **settings),
                    train_dataset=data,
                    tokenizer=tiny.tokenizer(),
                    **arguments,
                )
            )

        trainer, lines = tiny.warnings_of(run)
    return trainer, [line for line in lines if "in bfloat16" in line]


def _train(trainer: Any) -> Any:
    trainer.train()
    return trainer
