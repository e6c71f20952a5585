"""The proof: one step of a tiny Mixtral under a real DeepSpeed engine, with the real trainers.

What the loss is without the auxiliary term is measured on the same batch, with the term switched off.
"""

from __future__ import annotations

import tempfile

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

COEFFICIENT = 0.5
OVERLAYS = ("deepspeed", "scikit-learn")
PARITY = True
VARIANTS = {"compiled": "accelerate 1.0 does not compile what DeepSpeed wraps: torch_compile=True changes nothing"}


def train() -> tiny.TrainingResult:
    seen = {method: _train(method) for method in ("CPO", "ORPO", "KTO", "BCO", "DPO")}
    verdicts = {each.outcome.verdict for each in seen.values()} - {Verdict.ABSENT}
    if len(verdicts) != 1:
        raise AssertionError(f"the trainers do not agree: {seen}")
    numbers = {method: each.outcome.to_dict() for method, each in seen.items()}
    # DPO gives no number before 0.11.0, BCO none before 0.10.1, so they are compared by their gradients only.
    loss = sum(each.loss or 0.0 for method, each in seen.items() if method not in ("DPO", "BCO"))
    gradients = {f"{method}.{name}": it for method, each in seen.items() for name, it in each.gradients.items()}
    return tiny.TrainingResult(Outcome(verdicts.pop(), numbers), loss, gradients)


def _train(method: str) -> tiny.TrainingResult:
    import torch
    import trl

    if not hasattr(trl, f"{method}Trainer"):
        return tiny.TrainingResult(absent("this trainer is in trl.experimental in this release"))
    trainer_class, config_class = getattr(trl, f"{method}Trainer"), getattr(trl, f"{method}Config")
    measured: list[tuple[float, float]] = []
    aux_losses: list[float] = []

    class Measured(tiny.one_group(trainer_class)):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.aux_loss_enabled = False
            with torch.no_grad():
                without = float(super().compute_loss(model, inputs))
            self.aux_loss_enabled = True
            result = super().compute_loss(model, inputs, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            measured.append((without, float(loss.detach())))
            return result

    def note(model, args, outputs):
        # KTO's forward for its KL and the one without the term have no gradient: those are not the loss's.
        if outputs.aux_loss.requires_grad:
            aux_losses.append(float(outputs.aux_loss.detach()))

    tokenizer = tiny.tokenizer()
    # Old releases need one and put it at the beginning, 0.12.0 mostly if it is not there yet.
    tokenizer.bos_token = tokenizer.eos_token
    # KTO shuffles its data without a seed before 0.12.0, BCO always; a batch of all of it is always the same.
    data = tiny.labelled().select(range(2)) if method in ("KTO", "BCO") else tiny.preferences()
    data = data.map(lambda row: {"prompt": f"{tokenizer.bos_token} {row['prompt']}"})
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT)
        policy.register_forward_hook(note)
        reference = {"ref_model": tiny.mixtral(folder, seed=1, coefficient=COEFFICIENT)}
        seen = tiny.FirstStep(policy)
        trainer = tiny.trainer(
            Measured,
            model=policy,
            args=tiny.config(config_class, max_length=16, max_prompt_length=8, deepspeed=tiny.deepspeed(stage=0)),
            train_dataset=data,
            tokenizer=tokenizer,
            **(reference if method in ("DPO", "KTO", "BCO") else {}),
        )
        try:
            trainer.train()
        except ValueError as error:
            if "too many values to unpack" not in str(error):
                raise
            return tiny.TrainingResult(
                absent("DPO fails with every mixture-of-experts model in this release (TRL PR 2039)")
            )
    without, loss = measured[0]
    right = without + COEFFICIENT * aux_losses[0]
    outcome = judge(loss, right=right, wrong=without, coefficient=COEFFICIENT, aux_loss=aux_losses[0])
    return tiny.TrainingResult(outcome, loss, seen.gradients)
