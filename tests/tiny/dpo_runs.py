"""DPO: the loss of the paper without TRL's code, and runs of the real DPOTrainer."""

from __future__ import annotations

import math
import tempfile
from typing import Any

from .data import preferences, tokenizer
from .launching import one_group
from .measuring import TrainingResult, measured
from .models import lora, mixtral, same_adapter
from .trainers import config, trainer


def preference_log_probs(model: Any, batch: Any, *, differentiable: bool = False) -> tuple[Any, Any]:
    """Return summed log-probs of the chosen and the rejected completions, each ``(batch,)``, without TRL's code.

    A batch has whole sequences with labels up to 0.11, prompts and completions up to 0.28, and all sequences with a
    mask of the completions, the chosen before the rejected, from 0.29 on.
    """
    import torch

    def summed(token_ids: Any, attention_mask: Any, completion_mask: Any) -> Any:
        with torch.set_grad_enabled(differentiable):
            logits = model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(2, token_ids[:, 1:].unsqueeze(2)).squeeze(2)
        return (log_probs * completion_mask[:, 1:]).sum(1)

    def of_side(side: str) -> Any:
        token_ids, attention_mask = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
        if f"{side}_labels" in batch:
            return summed(token_ids, attention_mask, batch[f"{side}_labels"] != -100)
        prompt, prompt_mask = batch["prompt_input_ids"], batch["prompt_attention_mask"]
        completion_mask = torch.cat([torch.zeros_like(prompt_mask), attention_mask], 1)
        return summed(torch.cat([prompt, token_ids], 1), torch.cat([prompt_mask, attention_mask], 1), completion_mask)

    if "completion_mask" in batch:
        log_probs = summed(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        return tuple(log_probs.chunk(2))
    return of_side("chosen"), of_side("rejected")


def dpo_loss(beta: float, policy: tuple[Any, Any], reference: tuple[Any, Any]) -> float:
    """Equation 7 of the paper (arXiv:2305.18290): ``-log sigmoid`` of beta times the difference of the two margins."""
    import torch

    margins = [chosen - rejected for chosen, rejected in (policy, reference)]
    return float(-torch.nn.functional.logsigmoid(beta * (margins[0] - margins[1])).mean())


def precomputed_dpo(**settings: Any) -> Any:
    """Return a DPO config that precomputes the reference, with steps so large that a single one shows."""
    from trl import DPOConfig

    defaults = {"learning_rate": 1.0, "optim": "sgd", "beta": 0.5, "max_length": 16, "max_prompt_length": 8}
    return config(DPOConfig, precompute_ref_log_probs=True, **{**defaults, **settings})


def one_step_of_moe_dpo(*, adapter: bool = False, **settings: Any) -> TrainingResult:
    """Train one step of a tiny Mixtral with the real DPOTrainer, or of an adapter on it.

    Policy and reference have the same weights, so the DPO loss of the first step is log 2, and the rest of the loss is
    the auxiliary term. 1.8.0 takes the coefficient from the arguments only, so it is passed there too.
    """
    from trl import DPOConfig, DPOTrainer

    from trl_hotfix.authoring import judge

    coefficient = 0.5
    measured_trainer = measured(one_group(DPOTrainer))
    prefixing_tokenizer = tokenizer()
    # 0.9.6 needs this token and puts it at the beginning; later releases do so if it is not there yet.
    prefixing_tokenizer.bos_token = prefixing_tokenizer.eos_token
    settings = {"max_length": 16, "max_prompt_length": 8, "router_aux_loss_coef": coefficient, **settings}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (mixtral(folder, seed=0, coefficient=coefficient) for _ in range(2))
        dpo_trainer = trainer(
            measured_trainer,
            model=policy,
            args=config(DPOConfig, **settings),
            train_dataset=preferences().map(lambda row: {"prompt": f"{prefixing_tokenizer.bos_token} {row['prompt']}"}),
            tokenizer=prefixing_tokenizer,
            **({"peft_config": lora()} if adapter else {"ref_model": reference}),
        )
        if adapter:
            same_adapter(dpo_trainer.model)
        dpo_trainer.train()
    loss, step = measured_trainer.losses[0], measured_trainer.step
    aux_loss = float(step.outputs.aux_loss.detach())
    right = math.log(2) + coefficient * aux_loss
    outcome = judge(loss, right=right, wrong=math.log(2), coefficient=coefficient, aux_loss=aux_loss)
    return TrainingResult(outcome, loss, step.gradients)
