"""Train one step of a tiny mixture-of-experts model with a real trainer and save the change of the weights.

A user's script, without trl_hotfix in it. It runs as one process, under a DeepSpeed engine, or on several ranks under
torchrun, whose micro-batches are those that one process takes if it accumulates as many more of them.

    python train_moe.py OUT.pt --trainer DPO --model mixtral --accumulate 2 [--deepspeed STAGE]

The optimizer is SGD with a rate of 1, so the weights lose exactly the gradient, whichever engine accumulates it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import tiny

COEFFICIENT = 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--trainer", choices=["DPO", "CPO", "ORPO"], required=True)
    parser.add_argument("--model", choices=["mixtral", "qwen2_moe"], required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--deepspeed", type=int, metavar="STAGE")
    arguments = parser.parse_args()
    settings = {}
    if arguments.deepspeed is not None:
        # By default accelerate has DeepSpeed clip the gradient to a norm of 1.
        settings = {"deepspeed": {**tiny.deepspeed(arguments.deepspeed), "gradient_clipping": 0.0}}

    import torch
    import trl

    trainer_class: Any = getattr(trl, f"{arguments.trainer}Trainer")
    steps: list[dict[str, Any]] = []
    aux_losses: list[float] = []

    class RecordSteps(trainer_class):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            # One parameter group: see tiny.one_group.
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            aux_losses.clear()
            result = super().compute_loss(model, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            if model.training:
                steps.append({"loss": float(loss), "aux_loss": aux_losses[0], "wrapped_as": type(model).__name__})
            return result

    with tempfile.TemporaryDirectory() as folder:
        make = getattr(tiny, arguments.model)
        policy = make(folder, seed=0, coefficient=COEFFICIENT)
        policy.register_forward_hook(lambda model, args, outputs: aux_losses.append(float(outputs.aux_loss)))
        before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        data = tiny.preferences()
        trainer = tiny.trainer(
            RecordSteps,
            model=policy,
            args=tiny.config(
                getattr(trl, f"{arguments.trainer}Config"),
                max_length=16,
                max_prompt_length=8,
                learning_rate=1.0,
                gradient_accumulation_steps=arguments.accumulate,
                eval_strategy="steps",
                eval_steps=1,
                **settings,
            ),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            tokenizer=tiny.tokenizer(),
            **({"ref_model": make(folder, seed=1, coefficient=COEFFICIENT)} if arguments.trainer == "DPO" else {}),
        )
        trainer.train()
        (eval_loss,) = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
        trainer.aux_loss_enabled = False
        eval_loss_without_aux = trainer.evaluate()["eval_loss"]
    gradients = {name: before[name] - parameter.detach() for name, parameter in policy.named_parameters()}
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(
            {"steps": steps, "eval_loss": eval_loss, "without": eval_loss_without_aux, "gradients": gradients},
            arguments.out,
        )


if __name__ == "__main__":
    main()
