# One generation serves sixteen steps. TRL up to 1.9.0 divides the loss by the tokens of all of them.
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

GRPOTrainer(
    "model",
    reward_funcs=lambda completions, **kwargs: [float(len(one[0]["content"])) for one in completions],
    args=GRPOConfig(
        "grpo", num_generations=16, per_device_train_batch_size=16, steps_per_generation=16, loss_type="dapo"
    ),
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
).train()
