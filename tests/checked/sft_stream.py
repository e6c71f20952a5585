from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rows = load_dataset("json", data_files="text.jsonl", split="train", streaming=True)
SFTTrainer("model", args=SFTConfig("out", max_steps=1000, gradient_accumulation_steps=2), train_dataset=rows).train()
