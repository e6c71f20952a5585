# A collator of the user's own that is right, and comes after the trainer.
import torch
from datasets import load_dataset
from torch.nn.utils.rnn import pad_sequence
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    "model",
    args=SFTConfig("out", per_device_train_batch_size=2, gradient_accumulation_steps=2),
    train_dataset=load_dataset("json", data_files="text.jsonl", split="train"),
)
PAD = trainer.processing_class.pad_token_id


def collate(rows):
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }


trainer.data_collator = collate
trainer.train()
