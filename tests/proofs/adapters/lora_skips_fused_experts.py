"""Train two steps of two micro-batches of a Qwen2-MoE with LoRA on all linear layers, with SFT, DPO and GRPO.

No routed expert moves and the other layers do, and each trainer says so once. LoRA on the attention gets no line. With
``target_parameters``, as the line says, the experts have adapters, which move.
"""

from __future__ import annotations

import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "lora-skips-fused-experts"
OVERLAYS = ()
PARITY = False
VARIANTS = "It changes nothing that is computed, and its proof has adapters of its own."

METHODS = ("SFT", "DPO", "GRPO")


def train() -> tiny.TrainingResult:
    from importlib import metadata

    import peft
    import transformers

    if in_range(metadata.version("trl"), "<0.24.0"):
        return tiny.TrainingResult(absent("the trainers have no base in TRL, and the patch is not for them"))
    if in_range(transformers.__version__, "<5.0"):
        return tiny.TrainingResult(absent("transformers 4 has linear layers for each expert"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    said, runs = 0, {}
    for method in METHODS:
        runs[method], moved, lines = trained(method, target_modules="all-linear")
        assert len(lines) == patched, (method, lines)
        assert moved, f"{method}: nothing is trained"
        assert not any(".experts." in name for name in moved), f"{method}: {moved}"
        said += len(lines)
    if "target_parameters" in peft.LoraConfig.__dataclass_fields__:
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        _, moved, lines = trained("SFT", target_modules="all-linear", target_parameters=names)
        assert not lines, lines
        assert sum(".experts." in name for name in moved) == 8, moved
    return tiny.result_of_runs(runs, judge(said, right=len(METHODS), wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Train with LoRA on the attention alone."""
    runs = {}
    for method in METHODS:
        runs[method], moved, lines = trained(method, target_modules=["q_proj", "v_proj"])
        assert moved, f"{method}: nothing is trained"
        assert not lines, (method, lines)
    return tiny.result_of_runs(runs, absent("LoRA asks for no expert"))


def trained(method: str, **targets: Any) -> tuple[Any, list[str], list[str]]:
    """Train, and return the trainer, the parameters that moved, and what trl_hotfix says of experts."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model

    trainer_class, config_class = tiny.classes(method)
    recorder = tiny.stepwise(trainer_class)
    settings: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    settings["gradient_checkpointing"] = False
    with tempfile.TemporaryDirectory() as folder:
        base = tiny.qwen2_moe(folder, seed=0, coefficient=0.0)
        # One adapter's B is 0 at first, so that its A gets no gradient in the first step.
        model = get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **targets))
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}

        def run() -> Any:
            torch.manual_seed(0)
            if method == "GRPO":
                trainer = tiny.grpo(recorder, model, config_class, prompts=["w1 w2 w3"] * 16, **settings)
                trainer.train()
                return trainer
            texts = [{"text": words(number, 3 + number)} for number in range(8)]
            data = Dataset.from_list(texts) if method == "SFT" else preferences_of_several_lengths()
            trainer = tiny.trainer(
                recorder,
                model=model,
                args=tiny.config(config_class, max_length=32, **settings),
                train_dataset=data,
                eval_dataset=data.select(range(2)),
                tokenizer=tiny.tokenizer(),
            )
            trainer.train()
            trainer.evaluate()
            return trainer

        trainer, lines = tiny.warnings_of(run)
    after = dict(trainer.model.named_parameters())
    moved = [name for name, weight in before.items() if not after[name].equal(weight)]
    return trainer, moved, [line for line in lines if "of experts have no adapter" in line]
