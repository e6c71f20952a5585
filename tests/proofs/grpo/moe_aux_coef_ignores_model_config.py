"""The proof: one step of a tiny Mixtral whose config has a coefficient of 0.5, with default arguments and the real
trainers: SFT with the name of the model, DPO with LoRA, KTO, GRPO and RLOO with the model.

The loss without the auxiliary term is measured on the same batch, with a coefficient of 0. With transformers before 5.0
a Mixtral keeps a coefficient of its own, taken from the config before SFT overwrites it: its loss is right then, and
the config, which is saved with the model, is wrong.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed
from trl_hotfix.model import Outcome, Verdict

import tiny

COEFFICIENT, DEFAULT = 0.5, 0.001
OVERLAYS = ()
PARITY = True
EQUIVALENT = {
    "applied twice": "the second finds an argument that is not the default, and leaves it",
    "constant": "a constructor returns nothing",
}


def train() -> tiny.TrainingResult:
    results = {method: _train(method) for method in ("SFT", "GRPO", "RLOO", "DPO", "KTO")}
    verdicts = {result.outcome.verdict for result in results.values()} - {Verdict.ABSENT}
    if len(verdicts) > 1:
        raise AssertionError(f"the trainers do not agree: {results}")
    numbers = {method: result.outcome.to_dict() for method, result in results.items()}
    # The arguments of DPO and KTO have a coefficient only from 1.8.0 on; these two are compared by their gradients.
    loss = sum(results[method].loss or 0.0 for method in ("SFT", "GRPO", "RLOO"))
    gradients = {
        f"{method}.{name}": gradient
        for method, result in results.items()
        for name, gradient in result.gradients.items()
    }
    return tiny.TrainingResult(Outcome(verdicts.pop() if verdicts else Verdict.ABSENT, numbers), loss, gradients)


def _train(method: str) -> tiny.TrainingResult:
    import torch
    import transformers
    import trl
    from packaging.version import Version

    config_class = getattr(trl, f"{method}Config", None)
    if config_class is None or not hasattr(config_class, "router_aux_loss_coef"):
        return tiny.TrainingResult(absent("the trainer's arguments have no coefficient in this release"))
    trainer_class: Any = getattr(trl, f"{method}Trainer")

    class WithoutAndWithAuxTerm(tiny.measured(trainer_class)):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as coefficient_of_zero, torch.no_grad():
                for owner in (self, self.model.config, *self.model.modules()):
                    if "router_aux_loss_coef" in vars(owner):
                        coefficient_of_zero.enter_context(shadowed(owner, "router_aux_loss_coef", 0.0))
                super().compute_loss(*args, **kwargs)
            return super().compute_loss(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT) for _ in range(2))
        words = tiny.tokenizer()
        # The variant with an adapter puts it on the model.
        model = policy if tiny.variant == "lora" else str(Path(folder, "mixtral-0"))
        if method in ("GRPO", "RLOO"):
            trainer = tiny.grpo(WithoutAndWithAuxTerm, policy, config_class, beta=0.0)
        else:
            arguments = {
                "SFT": {"model": model, "train_dataset": tiny.preferences()},
                "DPO": {"model": policy, "peft_config": tiny.lora(), "train_dataset": tiny.preferences()},
                "KTO": {"model": policy, "ref_model": reference, "train_dataset": tiny.labelled()},
            }[method]
            if method == "SFT":
                data = arguments["train_dataset"].rename_column("chosen", "completion").remove_columns("rejected")
                arguments["train_dataset"] = data
            args = tiny.config(config_class, max_length=16)
            trainer = tiny.trainer(WithoutAndWithAuxTerm, args=args, processing_class=words, **arguments)
        for name, parameter in trainer.model.named_parameters():
            if ".lora_" in name and parameter.requires_grad and parameter.any():
                # PEFT draws these at random, with other numbers in other releases.
                index = torch.arange(parameter.numel(), dtype=parameter.dtype)
                parameter.data.copy_(torch.sin(index).reshape(parameter.shape))
        trainer.train()
        saved_coefficient = trainer.model.config.router_aux_loss_coef
    without, loss = trainer.losses[:2]
    aux_loss = float(trainer.step.outputs.aux_loss.detach())
    numbers = {"aux_loss": aux_loss, "without": without, "loss": loss, "config": saved_coefficient}
    if method == "SFT" and Version(transformers.__version__) < Version("5.0.0"):
        outcome = judge(saved_coefficient, right=COEFFICIENT, wrong=DEFAULT, **numbers)
    else:
        right, wrong = (without + coefficient * aux_loss for coefficient in (COEFFICIENT, DEFAULT))
        outcome = judge(loss, right=right, wrong=wrong, **numbers)
    return tiny.TrainingResult(outcome, loss, trainer.step.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train with a coefficient that the arguments set, with a config that declares the default, and a dense model."""
    import torch
    from trl import GRPOConfig, GRPOTrainer

    loss, gradients = 0.0, {}
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "set": (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT), {"router_aux_loss_coef": 0.25}),
            "off": (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT), {"router_aux_loss_coef": 0.0}),
            "default": (tiny.mixtral(folder, seed=0, coefficient=DEFAULT), {}),
            "dense": (tiny.llama(folder, seed=0), {}),
        }
        for name, (model, settings) in runs.items():
            torch.manual_seed(0)
            trainer = tiny.grpo(tiny.measured(GRPOTrainer), model, GRPOConfig, beta=0.0, **settings)
            trainer.train()
            loss += trainer.losses[0]
            gradients |= {f"{name} {key}": value for key, value in trainer.step.gradients.items()}
    return tiny.TrainingResult(absent("the arguments decide, or nothing does"), loss, gradients)
