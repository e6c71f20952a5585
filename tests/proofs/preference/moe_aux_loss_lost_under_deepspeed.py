"""The proof: two steps of a tiny Mixtral under a real DeepSpeed engine, with the real trainers.

Each loss is compared with the loss without the auxiliary term plus coefficient * aux_loss. The loss without the term is
measured on the same batch, with the term switched off.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.data import preferences_of_several_lengths

COEFFICIENT = 0.5
METHODS = ("CPO", "ORPO", "KTO", "BCO", "DPO")
OVERLAYS = ("deepspeed", "scikit-learn")
PARITY = True
VARIANTS = {"compiled": "accelerate 1.0 does not compile what DeepSpeed wraps: torch_compile=True changes nothing"}
EQUIVALENT = {"applied twice": "the inner one finds the coefficient in the config of the outer one's view"}


def train() -> tiny.TrainingResult:
    results = {method: _train(method) for method in METHODS}
    verdicts = {result.outcome.verdict for result in results.values()} - {Verdict.ABSENT}
    if len(verdicts) != 1:
        raise AssertionError(f"the trainers do not agree: {results}")
    numbers = {method: result.outcome.to_dict() for method, result in results.items()}
    # DPO gives no number before 0.11.0, BCO none before 0.10.1, so they are compared by their gradients only.
    loss = sum(result.loss or 0.0 for method, result in results.items() if method not in ("DPO", "BCO"))
    gradients = {
        f"{method}.{name}": gradient
        for method, result in results.items()
        for name, gradient in result.gradients.items()
    }
    return tiny.TrainingResult(Outcome(verdicts.pop(), numbers), loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train dense models under DeepSpeed."""
    results = {method: _train(method, is_dense=True) for method in ("DPO", "CPO", "ORPO")}
    gradients = {f"{method}.{key}": value for method, run in results.items() for key, value in run.gradients.items()}
    return tiny.TrainingResult(absent("the model has no router"), results["DPO"].loss, gradients)


def _train(method: str, *, is_dense: bool = False) -> tiny.TrainingResult:
    import torch
    import trl

    if not hasattr(trl, f"{method}Trainer"):
        return tiny.TrainingResult(absent("this trainer is in trl.experimental in this release"))
    trainer_class, config_class = getattr(trl, f"{method}Trainer"), getattr(trl, f"{method}Config")
    aux_losses: list[Any] = []
    outcomes: list[Outcome] = []

    class WithoutAndWithAuxTerm(tiny.measured(tiny.one_group(trainer_class))):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if is_dense:
                return super().compute_loss(model, inputs, *args, **kwargs)
            self.aux_loss_enabled = False
            with torch.no_grad():
                without = trainer_class.compute_loss(self, model, dict(inputs))
            self.aux_loss_enabled = True
            aux_losses.clear()
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            right = without + COEFFICIENT * aux_losses[0]
            values = {"right": float(right.detach()), "wrong": float(without.detach())}
            outcomes.append(judge(float(loss.detach()), **values))
            return loss

    def record_aux_loss(model, args, outputs):
        # KTO's forward for its KL has no gradient: the loss does not depend on it.
        if outputs.aux_loss is not None and outputs.aux_loss.requires_grad:
            aux_losses.append(outputs.aux_loss)

    tokenizer = tiny.tokenizer()
    # Old releases need one and prepend it, 0.12.0 mostly only if the prompt lacks it.
    tokenizer.bos_token = tokenizer.eos_token
    # KTO shuffles its data without a seed before 0.12.0, BCO always; a batch of all the data is always the same.
    single = method in ("KTO", "BCO")
    data = tiny.labelled().select(range(2)) if single else preferences_of_several_lengths()
    data = data.map(lambda row: {"prompt": f"{tokenizer.bos_token} {row['prompt']}"})
    settings = {"max_length": 16, "max_prompt_length": 8, "max_steps": 2, "deepspeed": tiny.deepspeed(stage=0)}
    settings |= {} if single else {"gradient_accumulation_steps": 2}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (
            tiny.llama(folder, seed=seed) if is_dense else tiny.mixtral(folder, seed=seed, coefficient=COEFFICIENT)
            for seed in (0, 1)
        )
        if not is_dense:
            policy.register_forward_hook(record_aux_loss)
        trainer = tiny.trainer(
            WithoutAndWithAuxTerm,
            model=policy,
            args=tiny.config(config_class, **settings),
            train_dataset=data,
            tokenizer=tokenizer,
            **({"ref_model": reference} if method in ("DPO", "KTO", "BCO") else {}),
        )
        try:
            trainer.train()
        except ValueError as error:
            if "too many values to unpack" not in str(error):
                raise
            return tiny.TrainingResult(
                absent("DPO fails with every mixture-of-experts model in this release (TRL PR 2039)")
            )
    if is_dense:
        return tiny.TrainingResult(None, trainer.losses[0], trainer.step.gradients)
    if len({outcome.verdict for outcome in outcomes}) != 1 or len(outcomes) != (2 if single else 4):
        raise AssertionError(f"the micro-batches are not of one kind: {outcomes}")
    return tiny.TrainingResult(outcomes[0], trainer.losses[0], trainer.step.gradients)
