# Wrong: the labels of the padding are tokens.
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("model")


def collate(rows):
    batch = tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt")
    batch["labels"] = batch["input_ids"].clone()
    return batch


SFTTrainer(
    "model",
    args=SFTConfig("out", per_device_train_batch_size=4),
    train_dataset=load_dataset("json", data_files="text.jsonl", split="train"),
    processing_class=tokenizer,
    data_collator=collate,
).train()
