"""One training step of the real GRPOTrainer, on one rank or on several: the gradients that the optimizer is given.

    python train_grpo_ranks.py OUT.pt NORMALISATION        # off, sequence or global

Every rank has a group of four completions of its own lengths; one process alone has both groups in one micro-batch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

LENGTHS = ((2, 4, 8, 6), (2, 3, 2, 3))
"""Tokens of the completions of the group on each rank, the end of sequence among them."""


def main(out: str, normalisation: str) -> None:
    import torch

    import trl_hotfix

    import tiny

    if normalisation != "off":
        chosen = {"grpo-loss-normalisation": {"normalisation": normalisation}}
        trl_hotfix.apply(only=["grpo-loss-normalisation"], options=chosen, strict=True)
    from trl import GRPOTrainer

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    mine = LENGTHS[rank] if ranks > 1 else LENGTHS[0] + LENGTHS[1]
    seen: dict[str, Any] = {}

    class Measured(GRPOTrainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            plain = self.accelerator.unwrap_model(model)
            gradients = {name: each.grad.clone() for name, each in plain.named_parameters() if each.grad is not None}
            kl = list(self._metrics["train"]["kl"])
            seen.update({"wrapped_as": type(model).__name__, "kl": kl, "gradients": gradients})
            return loss

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        trainer = tiny.grpo(Measured, policy, lengths=mine, beta=0.1, per_device_train_batch_size=len(mine))
        # Another reference than the policy, so that there is a divergence.
        for parameter in trainer.ref_model.parameters():
            parameter.data.mul_(1.5)
        trainer.train()
    if rank == 0:
        torch.save(seen, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
