"""The proof: one step of a tiny Mixtral under a real DeepSpeed engine, with the real trainers.

The loss without the auxiliary term is measured on the same batch, with the term switched off.
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
    results = {method: _train(method) for method in ("CPO", "ORPO", "KTO", "BCO", "DPO")}
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


def _train(method: str) -> tiny.TrainingResult:
    import torch
    import trl

    if not hasattr(trl, f"{method}Trainer"):
        return tiny.TrainingResult(absent("this trainer is in trl.experimental in this release"))
    trainer_class, config_class = getattr(trl, f"{method}Trainer"), getattr(trl, f"{method}Config")
    aux_losses: list[float] = []

    class WithoutAndWithAuxTerm(tiny.measured(tiny.one_group(trainer_class))):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.aux_loss_enabled = False
            with torch.no_grad():
                super().compute_loss(model, inputs)
            self.aux_loss_enabled = True
            return super().compute_loss(model, inputs, *args, **kwargs)

    def record_aux_loss(model, args, outputs):
        # KTO's forward for its KL and the one without the term have no gradient: the loss does not depend on them.
        if outputs.aux_loss.requires_grad:
            aux_losses.append(float(outputs.aux_loss.detach()))

    tokenizer = tiny.tokenizer()
    # Old releases need one and prepend it, 0.12.0 mostly only if the prompt lacks it.
    tokenizer.bos_token = tokenizer.eos_token
    # KTO shuffles its data without a seed before 0.12.0, BCO always; a batch of all the data is always the same.
    data = tiny.labelled().select(range(2)) if method in ("KTO", "BCO") else tiny.preferences()
    data = data.map(lambda row: {"prompt": f"{tokenizer.bos_token} {row['prompt']}"})
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT)
        policy.register_forward_hook(record_aux_loss)
        reference = {"ref_model": tiny.mixtral(folder, seed=1, coefficient=COEFFICIENT)}
        trainer = tiny.trainer(
            WithoutAndWithAuxTerm,
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
    without, loss = trainer.losses[:2]
    right = without + COEFFICIENT * aux_losses[0]
    outcome = judge(loss, right=right, wrong=without, coefficient=COEFFICIENT, aux_loss=aux_losses[0])
    return tiny.TrainingResult(outcome, loss, trainer.step.gradients)
