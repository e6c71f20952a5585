"""Supervised fine-tuning; the trainer's fixed arguments are bound once."""
from functools import partial

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara")
make_trainer = partial(SFTTrainer, model="Qwen/Qwen2.5-0.5B", train_dataset=dataset["train"])

trainer = make_trainer(args=SFTConfig(output_dir="out", packing=True, max_length=1024))
trainer.train()
