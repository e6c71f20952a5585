from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

RLOOTrainer(
    "model",
    reward_funcs=lambda completions, **kwargs: [float(len(one[0]["content"])) for one in completions],
    args=RLOOConfig("rloo", num_generations=2, per_device_train_batch_size=4, gradient_accumulation_steps=2),
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
).train()
