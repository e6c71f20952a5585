import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def has_format(completions, **kwargs):
    return [1.0 if re.match(r"<think>.*</think>", one[0]["content"], re.DOTALL) else 0.0 for one in completions]


def length(completions, **kwargs):
    return [-abs(10 - len(one[0]["content"])) / 10 for one in completions]


trainer = GRPOTrainer(
    model="model",
    reward_funcs=[has_format, length],
    args=GRPOConfig(
        output_dir="grpo",
        per_device_train_batch_size=16,
        num_generations=16,
        gradient_accumulation_steps=4,
        max_completion_length=512,
        use_vllm=True,
        bf16=True,
        loss_type="dr_grpo",
    ),
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
)
trainer.train()
