"""Train two steps of SGD with the real SFTTrainer, and save how the weights have moved. A user's script.

    python train_under_deepspeed.py FOLDER MICRO_BATCHES [DEEPSPEED.json]

MICRO_BATCHES is their number on each rank. A record of trl_hotfix is beside the checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tiny


def weights(model: Any, *, gathered: bool) -> dict[str, Any]:
    """Return a copy of the parameters. ZeRO-3 has parts of them on each rank."""
    context: Any = nullcontext()
    if gathered:
        import deepspeed

        context = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with context:
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def main(folder: str, micro_batches: str, config_file: str = "") -> None:
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = json.loads(Path(config_file).read_text()) if config_file else None
    if config is not None:
        import deepspeed.ops

        # A C++ op for several processes on one host. To compile it takes minutes, and gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        tiny.one_process()

    class WithSgd(SFTTrainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

    torch.manual_seed(0)
    model = tiny.llama(folder, seed=0)
    before = weights(model, gathered=False)
    rows = [{"text": " ".join(f"w{(3 * row + place * place) % 60}" for place in range(5))} for row in range(16)]
    trainer = tiny.trainer(
        WithSgd,
        model=model,
        args=tiny.config(
            SFTConfig,
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=int(micro_batches),
            max_steps=2,
            learning_rate=0.5,
            max_length=16,
            save_strategy="steps",
            save_steps=2,
            save_only_model=True,
            **({"deepspeed": config} if config is not None else {}),
        ),
        train_dataset=Dataset.from_list(rows),
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    after = weights(model, gathered=config is not None and config["zero_optimization"]["stage"] == 3)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({name: after[name] - before[name] for name in before}, Path(folder, "moved.pt"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A rank that ends while the other still talks to it may abort, and threads of gloo at the end of Python.
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
