"""The proof: one step of GRPOTrainer, and from 0.29.0 on of DPOTrainer, with a trained adapter called "policy".

The expected result is the same step of the same adapter when it is called "default".
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
    """Return the loss of GRPO, and all gradients."""
    import trl
    from peft import get_peft_model

    def new_policy(folder: str) -> Any:
        policy = tiny.llama(folder, seed=0)
        if adapter is None or hasattr(policy, "peft_config"):
            return policy
        policy = get_peft_model(policy, tiny.lora(), adapter_name=adapter)
        tiny.set_adapters(policy)
        return policy

    with tempfile.TemporaryDirectory() as folder:
        grpo = tiny.grpo_of_one_length(tiny.measured(trl.GRPOTrainer), new_policy(folder), loss_type="grpo")
        grpo.train()
        gradients = {f"{adapter} grpo {name}": gradient for name, gradient in grpo.step.gradients.items()}
        if '"ref"' in inspect.getsource(inspect.unwrap(trl.DPOTrainer.__init__)):
            dpo = tiny.trainer(
                tiny.measured(trl.DPOTrainer),
                model=new_policy(folder),
                args=tiny.config(trl.DPOConfig, max_length=16, beta=0.5),
                train_dataset=tiny.preferences(),
                tokenizer=tiny.tokenizer(),
            )
            dpo.train()
            gradients |= {f"{adapter} dpo {name}": gradient for name, gradient in dpo.step.gradients.items()}
    return grpo.losses[0], gradients
