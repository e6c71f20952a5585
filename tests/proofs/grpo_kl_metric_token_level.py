"""The proof: one step of the real GRPOTrainer with a policy that has left its reference."""

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

    steps: list[tuple[float, float, float, float]] = []

    def log_probs(model, inputs):
        prompt, completion = inputs["prompt_ids"], inputs["completion_ids"]
        tokens = torch.cat([prompt, completion], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, prompt.size(1) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)

    class Measured(GRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            mode = "train" if self.model.training else "eval"
            with torch.no_grad():
                beyond = log_probs(reference, inputs) - log_probs(self.model, inputs)
            kl, mask = torch.exp(beyond) - beyond - 1, inputs["completion_mask"]
            per_sequence = ((kl * mask).sum(1) / mask.sum(1)).mean()
            per_token = (kl * mask).sum() / mask.sum()
            steps.append((float(loss.detach()), self._metrics[mode]["kl"][-1], float(per_sequence), float(per_token)))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        reference = copy.deepcopy(policy)
        seen = tiny.FirstStep(policy)
        trainer = tiny.grpo(Measured, policy, loss_type="grpo", beta=BETA)
        if not hasattr(trainer.args, "loss_type"):
            return tiny.TrainingResult(
                absent("this release has no choice of the loss; its metric is the mean that its loss is")
            )
        with torch.no_grad():
            for number, weight in enumerate(each for each in policy.parameters() if each.requires_grad):
                weight.add_(0.1 * torch.cos(number + torch.arange(weight.numel())).reshape(weight.shape))
        trainer.train()
    loss, noted, right, wrong = steps[0]
    # The ratio of the probabilities is 1 and the advantages of a group add up to 0: what is left is the KL term.
    if abs(loss - BETA * right) > 1e-5:
        raise AssertionError(f"the loss is {loss}, not {BETA * right}")
    return tiny.TrainingResult(judge(noted, right=right, wrong=wrong, kl_in_the_loss=loss / BETA), loss, seen.gradients)
