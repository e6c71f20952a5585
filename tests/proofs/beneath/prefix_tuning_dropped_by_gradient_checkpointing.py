"""Train a prefix for two steps of two micro-batches with DPO and gradient checkpointing, and evaluate.

Expected are the steps of the run without checkpointing: their losses, gradients and weights. With it the prefix has no
gradient, and does not move. From 1.0.0 on SFT does the same; some releases before raise an error there.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "prefix-tuning-dropped-by-gradient-checkpointing"
OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "what is dropped is a prefix", "full": "what is dropped is a prefix"}


def methods() -> tuple[str, ...]:
    return ("DPO", "SFT") if in_range(metadata.version("trl"), ">=1.0.0") else ("DPO",)


def train() -> tiny.TrainingResult:
    import transformers

    if not in_range(transformers.__version__, ">=4.53,<5"):
        return tiny.TrainingResult(absent("with this transformers such a run ends by an error"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    measured, right, runs = 0.0, 0.0, {}
    for method in methods():
        run, lines = trained(method, checkpointing=True)
        expected, _ = trained(method, checkpointing=False)
        assert len(lines) == patched, lines
        assert _acts(run, method) in (None, 1)
        moved, should_move = _moved(run), _moved(expected)
        assert should_move > 0
        if moved:
            for step, of_expected in zip(run.steps, expected.steps, strict=True):
                assert [part.loss for part in step.micro_batches] == [part.loss for part in of_expected.micro_batches]
                assert step.gradients.keys() == of_expected.gradients.keys()
                assert all(value.equal(of_expected.gradients[name]) for name, value in step.gradients.items())
        run.evaluate()
        measured, right = measured + moved, right + should_move
        runs[method] = run
    return tiny.result_of_runs(runs, judge(measured, right=right, wrong=0.0))


def unaffected() -> tiny.TrainingResult:
    """Train a prefix without checkpointing, and LoRA with it."""
    runs = {}
    for method in methods():
        runs[f"{method} prefix"], said = trained(method, checkpointing=False)
        runs[f"{method} LoRA"], more = trained(method, checkpointing=True, adapter=tiny.lora())
        assert not said + more
        for name in ("prefix", "LoRA"):
            assert not _acts(runs[f"{method} {name}"], method), f"{method} {name}: the wrapper acts"
            assert _moved(runs[f"{method} {name}"]) > 0
    return tiny.result_of_runs(runs, absent("nothing is dropped"))


def _moved(trainer: Any) -> float:
    """Return how far the trained parameters have moved."""
    trained = [(name, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    return sum(float((weight.detach() - trainer.before[name]).abs().sum()) for name, weight in trained)


def trained(method: str, *, checkpointing: bool, adapter: Any = None) -> tuple[Any, list[str]]:
    import torch
    from datasets import Dataset
    from peft import PrefixTuningConfig

    trainer_class, config_class = tiny.classes(method)
    # It begins at random.
    torch.manual_seed(0)
    data = (
        Dataset.from_list([{"text": words(number, 3 + number)} for number in range(8)])
        if method == "SFT"
        else preferences_of_several_lengths()
    )
    with tempfile.TemporaryDirectory() as folder:

        def train() -> Any:
            trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=tiny.llama(folder, seed=0),
                args=tiny.config(
                    config_class,
                    max_steps=2,
                    gradient_accumulation_steps=2,
                    optim="sgd",
                    learning_rate=0.1,
                    max_length=32,
                    gradient_checkpointing=checkpointing,
                ),
                train_dataset=data,
                eval_dataset=data.select(range(4)),
                tokenizer=tiny.tokenizer(),
                peft_config=adapter or PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            )
            weights = trainer.model.named_parameters()
            trainer.before = {name: weight.detach().clone() for name, weight in weights if weight.requires_grad}
            trainer.train()
            return trainer

        trainer, lines = tiny.warnings_of(train)
    return trainer, [line for line in lines if "drops the prefix" in line]


def _acts(trainer: Any, method: str) -> int | None:
    for base in type(trainer).__mro__:
        acted = tiny.acts(ID, f"{base.__module__}:{base.__name__}.get_train_dataloader", trainer)
        if acted is not None:
            return acted
    return None
