"""What a launcher and DeepSpeed need to train in one process on the CPU."""

from __future__ import annotations

import os
import socket
from typing import Any


def one_process() -> None:
    """Set the environment variables that a launcher of one process would set."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def deepspeed(stage: int) -> dict[str, Any]:
    """Return a DeepSpeed config for one process on the CPU."""
    import deepspeed.ops

    # A C++ op for several processes on one host: compiling it takes minutes and one process has no use for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    one_process()
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def one_group(trainer_class: Any) -> Any:
    """Return a subclass of the trainer whose optimizer has one parameter group.

    For a model without biases transformers makes a second, empty group, which DeepSpeed drops; torch's schedulers then
    count one group too few.
    """

    class OneGroup(trainer_class):  # type: ignore[misc, valid-type]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            import torch

            if self.optimizer is None:
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    return OneGroup
