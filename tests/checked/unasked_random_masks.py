# Random labels in a collator: no two runs are the same.
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    "model", args=SFTConfig("out"), train_dataset=load_dataset("json", data_files="text.jsonl", split="train")
)
collate = trainer.data_collator


def masked(rows):
    batch = collate(rows)
    batch["labels"][torch.rand(batch["labels"].shape) < 0.5] = -100
    return batch


trainer.data_collator = masked
trainer.train()
