"""Train two steps of two micro-batches with real trainers on a ``PeftModel`` that was loaded for inference.

Each goes to its end and moves nothing, and one line says so. The same runs with ``is_trainable=True`` move the adapter
and get no line, and neither does GRPO, of which another patch warns.
"""

from __future__ import annotations

import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "frozen-peftmodel-trains-nothing"
OVERLAYS = ()
PARITY = False
VARIANTS = "It changes nothing that is computed, and its proof loads the adapters that it trains."

SETTINGS = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1, "beta": 0.5}


def loaded(folder: str, *, is_trainable: bool) -> Any:
    """Return a ``PeftModel`` with an adapter from a folder, as PEFT loads it."""
    from peft import PeftModel, get_peft_model

    model = get_peft_model(tiny.llama(folder, seed=0), tiny.lora())
    tiny.set_adapters(model)
    model.save_pretrained(f"{folder}/adapter")
    return PeftModel.from_pretrained(tiny.llama(folder, seed=0), f"{folder}/adapter", is_trainable=is_trainable)


def methods() -> tuple[str, ...]:
    """Return the trainers whose dataloader the patch sees in this release, of those that are trained here."""
    import trl

    sees_base = any(target.attribute.startswith(("Base", "_Base")) for target in _targets())
    return ("SFT", "DPO", "KTO", "RLOO") if sees_base and hasattr(trl, "RLOOTrainer") else ("RLOO",)


def _targets() -> list[Any]:
    from importlib import metadata

    from packaging.specifiers import SpecifierSet

    from trl_hotfix.catalogue import loading

    (patch,) = (patch for patch in loading.load() if patch.id == ID)
    release = metadata.version("trl")
    ranges = [(target, SpecifierSet(target.trl or "", prereleases=True)) for target in patch.targets]
    return [target for target, versions in ranges if release in versions]


def trained(method: str, *, is_trainable: bool, checkpointing: bool = True) -> Any:
    """Train, and return the trainer with ``moved``: the largest change of a parameter."""
    trainer_class, config_class = tiny.classes(method)
    settings = {**SETTINGS, "gradient_checkpointing": checkpointing}
    with tempfile.TemporaryDirectory() as folder:
        policy = loaded(folder, is_trainable=is_trainable)
        before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
        recorder = tiny.stepwise(trainer_class)
        if method in ("GRPO", "RLOO"):
            trainer = tiny.grpo(recorder, policy, config_class, prompts=["w1 w2 w3"] * 16, **settings)
        else:
            data = {"DPO": tiny.preferences, "KTO": tiny.labelled}
            # Without it the reference is the frozen model without its adapter, and checkpointing raises an error.
            reference = {"ref_model": tiny.llama(folder, seed=1)} if method in data else {}
            trainer = tiny.trainer(
                recorder,
                model=policy,
                args=tiny.config(config_class, max_length=16, **settings),
                train_dataset=data[method]() if method in data else _texts(),
                tokenizer=tiny.tokenizer(),
                **reference,
            )
        trainer.train()
    trainer.moved = max(
        float((weight.detach() - before[name]).abs().max())
        for name, weight in trainer.model.named_parameters()
        if name in before
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [len(step.micro_batches) for step in trainer.steps] == [2, 2], method
    assert len(losses) == 2, f"{method} logged {losses}"
    return trainer


def _texts() -> Any:
    from datasets import Dataset

    return Dataset.from_list(
        [{"text": " ".join(f"w{row + place}" for place in range(2 + row % 5))} for row in range(8)]
    )


def _has_a_loop_of_its_own() -> bool:
    """Return whether RLOO of this release does not train as GRPO does: up to 0.21."""
    _, config_class = tiny.classes("RLOO")
    return "num_generations" not in config_class.__dataclass_fields__


def train() -> tiny.TrainingResult:
    if _has_a_loop_of_its_own():
        return tiny.TrainingResult(absent("RLOO of this release has a training loop of its own"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    said = 0
    for method in methods():
        trainer, lines = tiny.warnings_of(lambda method=method: trained(method, is_trainable=False))
        lines = [line for line in lines if "nothing is trained" in line]
        assert trainer.moved == 0.0, f"{method} moved a frozen parameter by {trainer.moved}"
        assert all(f"{method}Trainer" in trainer.__class__.__mro__[1].__name__ for _ in lines), lines
        assert len(lines) == (1 if patched else 0), (method, lines)
        said += len(lines)
        trainer, lines = tiny.warnings_of(lambda method=method: trained(method, is_trainable=True))
        assert trainer.moved > 0.0, f"{method} trained nothing"
        assert not [line for line in lines if "nothing is trained" in line], (method, lines)
    _, lines = tiny.warnings_of(lambda: trained("GRPO", is_trainable=False))
    assert not [line for line in lines if "nothing is trained" in line], lines
    # A KL term gives RLOO's loss a graph without checkpointing too.
    trainer, lines = tiny.warnings_of(lambda: trained("RLOO", is_trainable=False, checkpointing=False))
    assert trainer.moved == 0.0, trainer.moved
    said += sum("nothing is trained" in line for line in lines)
    return tiny.TrainingResult(judge(said, right=len(methods()) + 1, wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Train adapters that were loaded to be trained. Nothing is said of them, and nothing is changed."""
    if _has_a_loop_of_its_own():
        return tiny.TrainingResult(absent("RLOO of this release has a training loop of its own"))
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    for method in methods():
        trainer, lines = tiny.warnings_of(lambda method=method: trained(method, is_trainable=True))
        assert not [line for line in lines if "nothing is trained" in line], (method, lines)
        losses += [micro_batch.loss for step in trainer.steps for micro_batch in step.micro_batches]
        gradients |= {
            f"{method} {number} {name}": gradient
            for number, step in enumerate(trainer.steps)
            for name, gradient in step.gradients.items()
        }
    return tiny.TrainingResult(absent("the adapter is trained"), sum(losses), gradients)
