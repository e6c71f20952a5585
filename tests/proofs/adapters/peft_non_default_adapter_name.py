"""Train two steps of two micro-batches with the real GRPO, RLOO, DPO and KTO trainers and an adapter called "policy".

The adapter was trained before. Losses and gradients are compared with those of the same run when it is called
"default".
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"full": "what fails is the copy of an adapter"}

STEPS, MICRO_BATCHES = 2, 2
EQUIVALENT = {"applied twice": "the weights are copied once more"}


def train() -> tiny.TrainingResult:
    expected_loss, expected = _steps("default")
    # Unpatched there is no second trainer: its data are checked here, and kept out of the bench's comparison.
    prepared = list(tiny.fingerprints)
    tiny.fingerprints.clear()
    try:
        loss, gradients = _steps("policy")
    except KeyError as error:
        if error.args != ("default",):
            raise
        return tiny.TrainingResult(judge(0.0, right=1.0, wrong=0.0, error=repr(error)))
    finally:
        data, tiny.fingerprints[:] = list(tiny.fingerprints), prepared
    if len(data) != len(prepared):
        raise AssertionError(f"the data of the trainers are {data}, as default {prepared}")
    renamed = {name.replace("policy", "default"): gradient for name, gradient in gradients.items()}
    other = [name for name in expected if name not in renamed or not renamed[name].equal(expected[name])]
    if loss != expected_loss or other or len(renamed) != len(expected):
        raise AssertionError(f"the loss is {loss}, as default it is {expected_loss}; other gradients: {other}")
    return tiny.TrainingResult(judge(1.0, right=1.0, wrong=0.0), loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train an adapter that is called "default", and a model without an adapter."""
    loss, gradients = _steps("default")
    return tiny.TrainingResult(
        absent("the adapter has the name that is looked for"), loss, {**gradients, **_steps(None)[1]}
    )


def _steps(adapter: str | None) -> tuple[float, dict[str, Any]]:
    """Return the sum of the losses of all trainers that make such a reference, and all gradients."""
    import trl
    from peft import get_peft_model

    def new_policy(folder: str) -> Any:
        policy = tiny.llama(folder, seed=0)
        if adapter is None or hasattr(policy, "peft_config"):
            return policy
        policy = get_peft_model(policy, tiny.lora(), adapter_name=adapter)
        tiny.set_adapters(policy)
        return policy

    steps = {"max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES, "optim": "sgd", "learning_rate": 0.1}
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    for method in ("GRPO", "RLOO", "DPO", "KTO"):
        # KTO was experimental from 1.2.0 to 1.7.1.
        trainer_class, config_class = (
            tiny.classes(method)
            if method == "KTO"
            else (getattr(trl, f"{method}Trainer"), getattr(trl, f"{method}Config"))
        )
        if '"ref"' not in inspect.getsource(inspect.unwrap(trainer_class.__init__)):
            continue
        recorder = tiny.stepwise(trainer_class)
        with tempfile.TemporaryDirectory() as folder:
            if method in ("GRPO", "RLOO"):
                trainer = tiny.grpo(
                    recorder, new_policy(folder), config_class, prompts=["w1 w2 w3"] * 16, beta=0.5, **steps
                )
            else:
                trainer = tiny.trainer(
                    recorder,
                    model=new_policy(folder),
                    args=tiny.config(config_class, max_length=16, beta=0.5, **steps),
                    train_dataset=tiny.preferences() if method == "DPO" else tiny.labelled(),
                    tokenizer=tiny.tokenizer(),
                )
            trainer.train()
        if [len(step.micro_batches) for step in trainer.steps] != [MICRO_BATCHES] * STEPS:
            raise AssertionError(f"{method}: expected {STEPS} steps of {MICRO_BATCHES} micro-batches: {trainer.steps}")
        losses += [micro_batch.loss for step in trainer.steps for micro_batch in step.micro_batches]
        gradients |= {
            f"{adapter} {method} {number} {name}": gradient
            for number, step in enumerate(trainer.steps)
            for name, gradient in step.gradients.items()
        }
    return sum(losses), gradients
