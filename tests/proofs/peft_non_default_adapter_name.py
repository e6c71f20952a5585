"""The proof: one step of GRPOTrainer, and from 0.29.0 on of DPOTrainer, with a trained adapter called "policy".

What is right is the same step of the same adapter when it is called "default".
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


def train() -> tiny.TrainingResult:
    loss, right = _steps("default")
    # Unpatched there is no second trainer: its data are looked at here, and left out of what is compared.
    prepared = list(tiny.fingerprints)
    tiny.fingerprints.clear()
    try:
        its, gradients = _steps("policy")
    except KeyError as error:
        if error.args != ("default",):
            raise
        return tiny.TrainingResult(judge(0.0, right=1.0, wrong=0.0, error=repr(error)))
    finally:
        data, tiny.fingerprints[:] = list(tiny.fingerprints), prepared
    if len(data) != len(prepared):
        raise AssertionError(f"the data of the trainers are {data}, as default {prepared}")
    called = {name.replace("policy", "default"): gradient for name, gradient in gradients.items()}
    other = [name for name in right if name not in called or not called[name].equal(right[name])]
    if its != loss or other or len(called) != len(right):
        raise AssertionError(f"the loss is {its}, as default it is {loss}; other gradients: {other}")
    return tiny.TrainingResult(judge(1.0, right=1.0, wrong=0.0), its, gradients)


def unaffected() -> tiny.TrainingResult:
    """The adapter is called "default"; and there is none."""
    loss, gradients = _steps("default")
    return tiny.TrainingResult(
        absent("the adapter has the name that is looked for"), loss, {**gradients, **_steps(None)[1]}
    )


def _steps(adapter: str | None) -> tuple[float, dict[str, Any]]:
    """The loss of GRPO, and all gradients."""
    import trl
    from peft import get_peft_model

    def made(folder: str) -> Any:
        policy = tiny.llama(folder, seed=0)
        if adapter is None or hasattr(policy, "peft_config"):
            return policy
        policy = get_peft_model(policy, tiny.lora(), adapter_name=adapter)
        tiny.set_adapters(policy)
        return policy

    losses: list[float] = []

    def measured(trainer_class: type) -> type:
        class Measured(trainer_class):
            def compute_loss(self, *args, **kwargs):
                result = super().compute_loss(*args, **kwargs)
                losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
                return result

        return Measured

    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.grpo_of_one_length(measured(trl.GRPOTrainer), made(folder), loss_type="grpo")
        seen = tiny.FirstStep(trainer.model)
        trainer.train()
        gradients = {f"{adapter} grpo {name}": its for name, its in seen.gradients.items()}
        if '"ref"' in inspect.getsource(inspect.unwrap(trl.DPOTrainer.__init__)):
            trainer = tiny.trainer(
                measured(trl.DPOTrainer),
                model=made(folder),
                args=tiny.config(trl.DPOConfig, max_length=16, beta=0.5),
                train_dataset=tiny.preferences(),
                tokenizer=tiny.tokenizer(),
            )
            seen = tiny.FirstStep(trainer.model)
            trainer.train()
            gradients |= {f"{adapter} dpo {name}": its for name, its in seen.gradients.items()}
    return losses[0], gradients
