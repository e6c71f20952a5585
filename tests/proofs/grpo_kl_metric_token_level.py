"""Train one step with the real GRPOTrainer and a policy that differs from its reference."""

from __future__ import annotations

import copy
import tempfile

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False

BETA = 0.5


def train() -> tiny.TrainingResult:
    import torch
    from trl import GRPOTrainer

    steps: list[tuple[float, float, float]] = []

    def log_probs(model, inputs):
        prompt, completion = inputs["prompt_ids"], inputs["completion_ids"]
        tokens = torch.cat([prompt, completion], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, prompt.size(1) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)

    class KlRecorder(tiny.measured(GRPOTrainer)):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            mode = "train" if self.model.training else "eval"
            with torch.no_grad():
                log_ratio = log_probs(reference, inputs) - log_probs(self.model, inputs)
            kl, mask = torch.exp(log_ratio) - log_ratio - 1, inputs["completion_mask"]
            per_sequence = ((kl * mask).sum(1) / mask.sum(1)).mean()
            per_token = (kl * mask).sum() / mask.sum()
            steps.append((self._metrics[mode]["kl"][-1], float(per_sequence), float(per_token)))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        reference = copy.deepcopy(policy)
        trainer = tiny.grpo(KlRecorder, policy, loss_type="grpo", beta=BETA)
        if not hasattr(trainer.args, "loss_type"):
            return tiny.TrainingResult(
                absent("this release has no choice of the loss; its metric is the mean that its loss is")
            )
        with torch.no_grad():
            trainable = (parameter for parameter in policy.parameters() if parameter.requires_grad)
            for number, parameter in enumerate(trainable):
                parameter.add_(0.1 * torch.cos(number + torch.arange(parameter.numel())).reshape(parameter.shape))
        trainer.train()
    loss, (metric, per_sequence, per_token) = trainer.losses[0], steps[0]
    # The ratio of the probabilities is 1 and the advantages of a group add up to 0, so the loss is the KL term alone.
    if abs(loss - BETA * per_sequence) > 1e-5:
        raise AssertionError(f"the loss is {loss}, not {BETA * per_sequence}")
    outcome = judge(metric, right=per_sequence, wrong=per_token, kl_in_the_loss=loss / BETA)
    return tiny.TrainingResult(outcome, loss, trainer.step.gradients)
