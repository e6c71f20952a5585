"""The proof: one step of a tiny Mixtral whose config has a coefficient of 0.5, with default arguments and the real
trainers: SFT with the name of the model, DPO with LoRA, KTO, GRPO and RLOO with the model.

What the loss is without the auxiliary term is measured on the same batch, with a coefficient of 0. With transformers
before 5.0 a Mixtral keeps a coefficient of its own, made of the config before SFT writes over it: its loss is right
then, and what is wrong is the config, which is saved with it.
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


def train() -> tiny.TrainingResult:
    seen = {method: _train(method) for method in ("SFT", "GRPO", "RLOO", "DPO", "KTO")}
    verdicts = {each.outcome.verdict for each in seen.values()} - {Verdict.ABSENT}
    if len(verdicts) > 1:
        raise AssertionError(f"the trainers do not agree: {seen}")
    numbers = {method: each.outcome.to_dict() for method, each in seen.items()}
    # DPO's and KTO's arguments have a coefficient from 1.8.0 on only; theirs are compared by their gradients.
    loss = sum(seen[method].loss or 0.0 for method in ("SFT", "GRPO", "RLOO"))
    gradients = {f"{method}.{name}": it for method, each in seen.items() for name, it in each.gradients.items()}
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
    measured: list[tuple[float, float]] = []

    class Measured(trainer_class):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            places = [self, self.model.config, *self.model.modules()]
            with ExitStack() as none, torch.no_grad():
                for place in places:
                    if "router_aux_loss_coef" in vars(place):
                        none.enter_context(shadowed(place, "router_aux_loss_coef", 0.0))
                without = super().compute_loss(*args, **kwargs)
            result = super().compute_loss(*args, **kwargs)
            both = (each[0] if isinstance(each, tuple) else each for each in (without, result))
            measured.append(tuple(float(each.detach()) for each in both))
            return result

    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT) for _ in range(2))
        words = tiny.tokenizer()
        # The variant with an adapter puts it on the model.
        named = policy if tiny.variant == "lora" else str(Path(folder, "mixtral-0"))
        if method in ("GRPO", "RLOO"):
            trainer = tiny.grpo(Measured, policy, config_class, beta=0.0)
        else:
            known = {
                "SFT": {"model": named, "train_dataset": tiny.preferences()},
                "DPO": {"model": policy, "peft_config": tiny.lora(), "train_dataset": tiny.preferences()},
                "KTO": {"model": policy, "ref_model": reference, "train_dataset": tiny.labelled()},
            }[method]
            if method == "SFT":
                data = known["train_dataset"].rename_column("chosen", "completion").remove_columns("rejected")
                known["train_dataset"] = data
            trainer = tiny.trainer(
                Measured, args=tiny.config(config_class, max_length=16), processing_class=words, **known
            )
        for name, parameter in trainer.model.named_parameters():
            if ".lora_" in name and parameter.requires_grad and parameter.any():
                # Drawn at random by PEFT, and not after the same numbers in every release.
                index = torch.arange(parameter.numel(), dtype=parameter.dtype)
                parameter.data.copy_(torch.sin(index).reshape(parameter.shape))
        seen = tiny.FirstStep(trainer.model)
        trainer.train()
        saved = trainer.model.config.router_aux_loss_coef
    without, loss = measured[0]
    aux_loss = float(seen.outputs.aux_loss.detach())
    numbers = {"aux_loss": aux_loss, "without": without, "loss": loss, "config": saved}
    if method == "SFT" and Version(transformers.__version__) < Version("5.0.0"):
        outcome = judge(saved, right=COEFFICIENT, wrong=DEFAULT, **numbers)
    else:
        right, wrong = (without + each * aux_loss for each in (COEFFICIENT, DEFAULT))
        outcome = judge(loss, right=right, wrong=wrong, **numbers)
    return tiny.TrainingResult(outcome, loss, seen.gradients)
