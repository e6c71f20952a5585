"""Train one optimizer step of two accumulated micro-batches on several ranks, and save the gradient of the step.

    python train_sharded.py OUT.pt CASE WRAPPER RANKS on|off

Under torchrun this is one of ``RANKS`` ranks; alone it is the one process that has the rows of all of them, in as many
more micro-batches. ``WRAPPER`` is ``ddp``, ``fsdp2`` or ``zero1`` to ``zero3``. The optimizer is SGD with a rate of 1,
so that the weights lose exactly the gradient, whichever engine shards it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from launched import train_on_ranks

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
ACCUMULATED = 2
ROWS = 2
"""The rows of a micro-batch. Their lengths differ in it, and from rank to rank."""

GRPO_LENGTHS = (*train_on_ranks.LENGTHS, (8, 8, 2, 2, 7, 3, 2, 6))


def sizes(ranks: int, **settings: Any) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": ACCUMULATED * ranks // WORLD,
        "learning_rate": 1.0,
        **settings,
    }


def places(ranks: int) -> range:
    return range(ACCUMULATED * ROWS * ranks)


def sft(trainer_class: type, folder: str, settings: Mapping[str, Any], ranks: int) -> Any:
    from datasets import Dataset
    from trl import SFTConfig

    import tiny

    texts = [f"w{index} w{index + 1}" + " w9 w8" * (index % 5) for index in places(ranks)]
    is_moe = "router_aux_loss_coef" in settings
    return tiny.trainer(
        trainer_class,
        model=tiny.mixtral(folder, seed=0, coefficient=0.5) if is_moe else tiny.llama(folder, seed=0),
        args=tiny.config(SFTConfig, **{**sizes(ranks), "max_length": 16, "dataset_text_field": "text", **settings}),
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        tokenizer=tiny.tokenizer(),
        data_collator=train_on_ranks.collated,
    )


def gkd(trainer_class: type, folder: str, settings: Mapping[str, Any], ranks: int) -> Any:
    from datasets import Dataset

    import tiny

    words = tiny.tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    conversations = [
        [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": " ".join(["w5"] * (1 + index % 7))}]
        for index in places(ranks)
    ]
    _, config_class = tiny.classes("GKD")
    generated = {"max_new_tokens": 8, "max_length": 16, "temperature": 1.0, "lmbda": 0.0}
    return tiny.trainer(
        trainer_class,
        model=tiny.llama(folder, seed=0),
        teacher_model=tiny.llama(folder, seed=1),
        args=tiny.config(config_class, **{**sizes(ranks), **generated, **settings}),
        train_dataset=Dataset.from_list([{"messages": messages} for messages in conversations]),
        tokenizer=words,
    )


def gold(trainer_class: type, folder: str, settings: Mapping[str, Any], ranks: int) -> Any:
    from datasets import Dataset

    import tiny

    rows = [
        {"input_ids": [4, 5, *[8] * length], "completion_mask": [0, 0, *[1] * length], "original_prompt_text": "w1 w2"}
        for length in (1 + index % 7 for index in places(ranks))
    ]
    _, config_class = tiny.classes("GOLD")
    generated = {"max_completion_length": 8, "max_length": 16, "temperature": 1.0, "lmbda": 0.0}
    return tiny.trainer(
        trainer_class,
        model=tiny.llama(folder, seed=0),
        teacher_model=tiny.llama(folder, seed=1),
        args=tiny.config(config_class, **{**sizes(ranks), **generated, **settings}),
        train_dataset=Dataset.from_list(rows),
        tokenizer=tiny.tokenizer(),
    )


def pairs(ranks: int) -> Any:
    from datasets import concatenate_datasets

    from tiny.data import preferences_of_several_lengths

    rows = preferences_of_several_lengths()
    return concatenate_datasets([rows, rows]).select(places(ranks))


def dpo(trainer_class: type, folder: str, settings: Mapping[str, Any], ranks: int) -> Any:
    """Return a trainer of a mixture of experts, whose load-balancing loss is a mean over micro-batches."""
    from trl import DPOConfig

    import tiny

    lengths = {"max_length": 16, "max_prompt_length": 8}
    return tiny.trainer(
        trainer_class,
        model=tiny.mixtral(folder, seed=0, coefficient=0.5),
        ref_model=tiny.mixtral(folder, seed=1, coefficient=0.5),
        args=tiny.config(DPOConfig, **{**sizes(ranks), **lengths, **settings}),
        train_dataset=pairs(ranks),
        tokenizer=tiny.tokenizer(),
    )


def dpo_with_liger(trainer_class: type, folder: str, settings: Mapping[str, Any], ranks: int) -> Any:
    """Return a trainer with the loss of Liger, which is torch's own operations, and none of its kernels."""
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
    from trl import DPOConfig
    from trl.models.utils import _ForwardRedirection

    import tiny

    trainer = tiny.trainer(
        trainer_class,
        model=tiny.llama(folder, seed=0),
        ref_model=tiny.llama(folder, seed=1),
        args=tiny.config(DPOConfig, **{**sizes(ranks), "max_length": 32, "max_prompt_length": 16, **settings}),
        train_dataset=pairs(ranks),
        tokenizer=tiny.tokenizer(),
    )
    # Releases differ in the names.
    trainer.args.use_liger_loss = trainer.args.use_liger_kernel = trainer.use_liger_kernel = True
    trainer.dpo_loss_fn = trainer.liger_loss = LigerFusedLinearDPOLoss(beta=trainer.args.beta, compiled=False)
    trainer._forward_redirection = _ForwardRedirection()
    return trainer


def of_three_ranks(out: str, case: str, switch: str) -> None:
    """Run a case of ``train_on_ranks.py`` with three ranks. One process has the rows of all in a micro-batch."""
    first, second, third = GRPO_LENGTHS
    train_on_ranks.LENGTHS = GRPO_LENGTHS if WORLD > 1 else (first + second, third)
    train_on_ranks.main(out, case, switch)


Make = Callable[..., Any]
CASES: Mapping[str, tuple[str, Make, Mapping[str, Any], Mapping[str, Mapping[str, Any]]]] = {
    "tokens": ("SFT", sft, {}, {train_on_ranks.NORMALISER: {}}),
    "experts": ("SFT", sft, {"router_aux_loss_coef": 0.5}, {patch: {} for patch in train_on_ranks.AUX}),
    "smoothed": ("SFT", sft, {"label_smoothing_factor": 0.2}, {train_on_ranks.SMOOTHING: {}}),
    "dataset": ("GKD", gkd, {}, {train_on_ranks.GKD: {}}),
    "micro-batches": ("GKD", gkd, {}, {train_on_ranks.MICRO_BATCHES: {}}),
    "counted": ("SFT", sft, {}, {train_on_ranks.COUNTED: {}}),
    "buffered": ("GOLD", gold, {}, {train_on_ranks.GOLD: {}}),
    "pairs with liger": ("DPO", dpo_with_liger, {}, {"dpo-kto-liger-ddp-no-gradient-sync": {}}),
    "pairs": ("DPO", dpo, {"router_aux_loss_coef": 0.5}, {"dpo-aux-loss-dropped": {}}),
}
"""The trainer, how it is made, its settings, the patches and their options; GRPO's are in ``train_on_ranks.py``."""


def sharded(trainer_class: type, wrapper: str) -> Any:
    """Return a subclass of the trainer with SGD of one group, whose model FSDP2 shards if ``wrapper`` says so."""
    import torch

    class Sharded(trainer_class):  # type: ignore[misc, valid-type]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

        def train(self, *args: Any, **kwargs: Any) -> Any:
            if wrapper == "fsdp2":
                shard(self.model)
                # accelerate knows no FSDP on a CPU, and would put DDP around the shards.
                self.accelerator.prepare_model = lambda model, *args, **kwargs: model
            return super().train(*args, **kwargs)

    return Sharded


def shard(model: Any) -> None:
    """Shard each layer and the model over all ranks, with gloo."""
    import torch
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (WORLD,))
    for layer in [*model.model.layers, model]:
        # Gloo cannot average.
        fully_shard(layer, mesh=mesh).set_force_sum_reduction_for_comms(True)


def weights_of(model: Any, wrapper: str) -> dict[str, Any]:
    """Return a copy of all weights, whole, by name. All ranks have to call this."""
    if wrapper == "zero3":
        import deepspeed

        weights = {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                weights[name] = parameter.detach().clone()
        return weights
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }


def main(out: str, case: str, wrapper: str, ranks: str, switch: str) -> None:
    import torch

    import trl_hotfix

    import tiny

    if case not in CASES:
        of_three_ranks(out, case, switch)
        return
    method, make, settings, patches = CASES[case]
    if switch == "on":
        options = {patch: dict(chosen) for patch, chosen in patches.items() if chosen}
        trl_hotfix.apply(only=list(patches), options=options)
    if wrapper.startswith("zero"):
        config = tiny.deepspeed(int(wrapper[-1]))
        # By default accelerate has DeepSpeed clip the gradient to a norm of 1.
        settings = {**settings, "deepspeed": {**config, "gradient_clipping": 0.0}}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(sharded(tiny.classes(method)[0], wrapper), folder, settings, int(ranks))
        plain = trainer.model
        before = weights_of(plain, wrapper)
        trainer.train()
        after = weights_of(plain, wrapper)
        wrapped_as = type(trainer.model_wrapped).__name__
    if RANK == 0:
        gradients = {name: before[name] - after[name] for name in before}
        torch.save({"wrapped_as": wrapped_as, "gradients": gradients}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
