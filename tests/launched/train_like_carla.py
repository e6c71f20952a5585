"""Train one step of a tiny GRPO run with the arguments of TRL's own ``examples/scripts/openenv/carla.py``.

Those of them that the loss depends on: one micro-batch a generation, 16 micro-batches a step, the default loss. The
example has one completion for each server of its environment, here there are four. Model, prompts and rewards are tiny.
"""

from __future__ import annotations

import tempfile


def main() -> None:
    from trl import GRPOTrainer

    import tiny

    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.grpo(
            GRPOTrainer,
            tiny.llama(folder, seed=0),
            output_dir=folder,
            steps_per_generation=1,
            gradient_accumulation_steps=16,
            max_grad_norm=1.0,
            beta=0.0,
            prompts=tiny.PROMPTS * 2,
        )
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    print(f"loss {logged['loss']:.4f}  grad_norm {logged['grad_norm']:.4f}")


if __name__ == "__main__":
    main()
