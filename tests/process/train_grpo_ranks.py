"""Train one step of the real GRPOTrainer, on one rank or on several, and save the gradients before the optimizer.

    python train_grpo_ranks.py OUT.pt NORMALISATION        # off, sequence or global

Each rank has one group of four completions of its own lengths; one process has both groups in one micro-batch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

LENGTHS = ((2, 4, 8, 6), (2, 3, 2, 3))
"""Tokens of the completions of the group on each rank, with the end of sequence."""


def main(out: str, normalisation: str) -> None:
    import torch

    import trl_hotfix

    import tiny

    if normalisation != "off":
        chosen = {"grpo-loss-normalisation": {"normalisation": normalisation}}
        trl_hotfix.apply(only=["grpo-loss-normalisation"], options=chosen, strict=True)
    from trl import GRPOTrainer

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    lengths = LENGTHS[rank] if ranks > 1 else LENGTHS[0] + LENGTHS[1]
    record: dict[str, Any] = {}

    class RecordGradients(GRPOTrainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            plain = self.accelerator.unwrap_model(model)
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in plain.named_parameters()
                if parameter.grad is not None
            }
            kl = list(self._metrics["train"]["kl"])
            record.update({"wrapped_as": type(model).__name__, "kl": kl, "gradients": gradients})
            return loss

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        trainer = tiny.grpo(
            RecordGradients, policy, lengths=lengths, beta=0.1, per_device_train_batch_size=len(lengths)
        )
        # The reference must differ from the policy, or the divergence is 0.
        for parameter in trainer.ref_model.parameters():
            parameter.data.mul_(1.5)
        trainer.train()
    if rank == 0:
        torch.save(record, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
