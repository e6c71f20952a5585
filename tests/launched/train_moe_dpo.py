"""Train a tiny Mixtral with the real DPOTrainer and save the terms of the first steps' losses.

A user's script, without trl_hotfix in it. It measures from outside: by a forward hook on the model that the trainer
wraps, and by a subclass that records what ``compute_loss`` returns.

    python train_moe_dpo.py OUT.json [--deepspeed STAGE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import tiny

COEFFICIENT = 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--deepspeed", type=int, metavar="STAGE", help="train under a DeepSpeed engine of this ZeRO stage"
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments = parser.parse_args()
    settings = {} if arguments.deepspeed is None else {"deepspeed": tiny.deepspeed(arguments.deepspeed)}

    from trl import DPOConfig, DPOTrainer

    steps: list[dict[str, object]] = []
    aux_losses: list[float] = []

    class RecordSteps(tiny.one_group(DPOTrainer)):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            aux_losses.clear()
            result = super().compute_loss(model, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            steps.append({"loss": float(loss), "aux_loss": aux_losses[0], "wrapped_as": type(model).__name__})
            return result

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT)
        policy.register_forward_hook(lambda model, args, outputs: aux_losses.append(float(outputs.aux_loss)))
        router = policy.model.layers[0].block_sparse_moe.gate.weight
        router.register_hook(lambda gradient: steps[-1].update(router_gradient=float(gradient.norm())))
        data = tiny.preferences()
        trainer = tiny.trainer(
            RecordSteps,
            model=policy,
            ref_model=tiny.mixtral(folder, seed=1, coefficient=COEFFICIENT),
            args=tiny.config(
                DPOConfig,
                max_steps=arguments.steps,
                learning_rate=arguments.learning_rate,
                max_length=16,
                max_prompt_length=8,
                **settings,
            ),
            train_dataset=data,
            eval_dataset=data.select(range(2)),
            tokenizer=tiny.tokenizer(),
        )
        before = trainer.evaluate()["eval_loss"] if arguments.deepspeed is None else None
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    result = {
        "coefficient": COEFFICIENT,
        "steps": steps,
        "eval_loss_before": before,
        "eval_loss_after": after,
        "weights": float(sum(parameter.detach().double().abs().sum() for parameter in policy.parameters())),
    }
    arguments.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
