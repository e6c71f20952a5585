# Wrong: the padding on the left is attended to.
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


class LeftPadding:
    def __init__(self, pad):
        self.pad = pad

    def __call__(self, rows):
        width = max(len(row["input_ids"]) for row in rows)
        ids = [[self.pad] * (width - len(row["input_ids"])) + row["input_ids"] for row in rows]
        labels = [[-100] * (width - len(row["input_ids"])) + row["input_ids"] for row in rows]
        ids = torch.tensor(ids)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(labels)}


trainer = SFTTrainer(
    "model",
    args=SFTConfig("out", per_device_train_batch_size=8),
    train_dataset=load_dataset("json", data_files="text.jsonl", split="train"),
    data_collator=LeftPadding(pad=0),
)
trainer.train()
