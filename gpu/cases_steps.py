"""Whole steps against a computation without TRL's code: GRPO's losses in float64, and accumulation under DeepSpeed."""

from __future__ import annotations

from typing import Any

import tiny
from gpu.runs import LENGTHS, config, llama, need, rows
from tiny.grpo_steps import log_probs_of, over_sequences, over_tokens, token_losses


def grpo_losses(folder: str, device: str, dtype: str, losses: str) -> dict[str, Any]:
    """Compare the gradients of GRPO's losses with the formulas in float64 on the CPU. ``losses`` has commas."""
    from trl import GRPOConfig, GRPOTrainer

    answer: dict[str, Any] = {}
    for loss_type in losses.split(","):
        model = llama(folder, "sdpa", dtype)
        settings: dict[str, Any] = {"loss_type": loss_type, "beta": 0.0, "learning_rate": 0.0}
        of_device: dict[str, Any] = {"use_cpu": device == "cpu", "bf16": dtype == "bfloat16"}
        trainer = tiny.grpo(tiny.measured(GRPOTrainer), model, GRPOConfig, **settings, **of_device)
        on_cpu = model.generate
        model.generate = lambda input_ids, on_cpu=on_cpu, **kwargs: on_cpu(input_ids.cpu(), **kwargs).to(
            input_ids.device
        )
        trainer.train()
        given = {
            name: value.double().cpu() if hasattr(value, "is_floating_point") and value.is_floating_point() else value
            for name, value in trainer.batches[0].items()
        }
        inputs = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in given.items()}
        exact = llama(folder, "sdpa", dtype).double()
        log_probs = log_probs_of(exact, inputs)
        token_loss, _, mask = token_losses(trainer, inputs, log_probs, log_probs.detach())
        formulas = {
            "grpo": over_sequences,
            "bnpo": over_tokens,
            "dapo": over_tokens,  # One micro-batch is all that a step has.
            "dr_grpo": lambda values, mask, length=trainer.args.max_completion_length: (
                (values * mask).sum() / (len(mask) * length)
            ),
        }
        formulas[loss_type](token_loss, mask).backward()
        apart = size = 0.0
        for name, parameter in exact.named_parameters():
            if name in trainer.step.gradients:
                apart += float((trainer.step.gradients[name].double().cpu() - parameter.grad).square().sum())
                size += float(parameter.grad.square().sum())
        answer[f"{loss_type}: gradient"] = (apart / size) ** 0.5
    return answer


def offloaded(folder: str, device: str, accumulation: str) -> dict[str, Any]:
    """Compare the way of the weights in two steps of SGD under ZeRO-2, the optimizer offloaded, and without DeepSpeed.

    ``moved`` is the ratio of the lengths of the two ways: 1 where no micro-batch is dropped.
    """
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    need("deepspeed")

    class Sgd(SFTTrainer):  # type: ignore[misc]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            # One group of parameters: DeepSpeed drops an empty one, and torch's scheduler then counts one too few.
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    def moved(**settings: Any) -> Any:
        model = llama(folder, "sdpa", "float32")
        before = {name: value.detach().clone().cpu() for name, value in model.named_parameters()}
        steps: dict[str, Any] = {
            "gradient_accumulation_steps": int(accumulation),
            "max_steps": 2,
            "per_device_train_batch_size": 1,
        }
        trainer = tiny.trainer(
            Sgd,
            model=model,
            args=config(SFTConfig, device, learning_rate=0.1, max_length=64, **steps, **settings),
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows(LENGTHS)]),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
        return torch.cat([(value.detach().cpu() - before[name]).flatten() for name, value in model.named_parameters()])

    expected = moved()
    engine = tiny.deepspeed(2)
    engine["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    engine |= {"zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    under_deepspeed = moved(deepspeed=engine)
    return {
        "moved": float(under_deepspeed.norm() / expected.norm()),
        "difference": float((under_deepspeed - expected).norm() / expected.norm()),
    }
