"""Train a tiny Mixtral with the real DPOTrainer and write down what the first steps' losses are made of.

A user's script: nothing in it knows of trl_hotfix. It measures from outside, by a forward hook on the model that the
trainer wraps and by a subclass that looks at what ``compute_loss`` returns.

    python train_moe_dpo.py OUT.json [--deepspeed STAGE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

COEFFICIENT = 0.5


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{index}" for index in range(60))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def tiny_mixtral(seed: int):
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            output_router_logits=True,
            router_aux_loss_coef=COEFFICIENT,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def preferences():
    from datasets import Dataset

    rows = [
        {
            "prompt": f"w{index} w{index + 1} w{index + 2}",
            "chosen": f"w{index + 3} w{index + 5} w{index + 7}",
            "rejected": f"w{index + 4} w{index + 6}",
        }
        for index in range(8)
    ]
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--deepspeed", type=int, metavar="STAGE", help="train under a DeepSpeed engine, this ZeRO stage"
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments = parser.parse_args()

    if arguments.deepspeed is not None:
        import deepspeed.ops
        from moe_dpo import free_port

        # A C++ op for several processes on one host: compiling it takes minutes and one process has no use for it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**one_process, "MASTER_PORT": free_port()}.items():
            os.environ.setdefault(name, value)

    import torch
    from trl import DPOConfig, DPOTrainer

    steps: list[dict[str, float]] = []
    policy = tiny_mixtral(seed=0)
    seen: dict[str, float] = {}

    def note_aux_loss(model, args, outputs) -> None:
        seen.setdefault("aux_loss", float(outputs.aux_loss))

    def note_router_gradient(gradient) -> None:
        steps[-1]["router_gradient"] = float(gradient.norm())

    class Measured(DPOTrainer):
        def create_optimizer(self):
            # One group of parameters: transformers makes a second, empty one of a model without biases, which
            # DeepSpeed drops, and torch's schedulers then count one group too few.
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

        def compute_loss(self, model, inputs, return_outputs=False, **others):
            seen.clear()
            result = super().compute_loss(model, inputs, return_outputs, **others)
            loss = result[0] if return_outputs else result
            steps.append({"loss": float(loss), "aux_loss": seen["aux_loss"], "wrapped_as": type(model).__name__})
            return result

    policy.register_forward_hook(note_aux_loss)
    policy.model.layers[0].block_sparse_moe.gate.weight.register_hook(note_router_gradient)

    settings = {}
    if arguments.deepspeed is not None:
        settings["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": arguments.deepspeed},
            "zero_allow_untested_optimizer": True,
        }
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            max_length=16,
            max_prompt_length=8,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            remove_unused_columns=False,
            seed=0,
            **settings,
        )
        data = preferences()
        trainer = Measured(
            model=policy,
            ref_model=tiny_mixtral(seed=1),
            args=args,
            train_dataset=data,
            eval_dataset=data.select(range(2)),
            tokenizer=tiny_tokenizer(),
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
