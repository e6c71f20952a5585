from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("ours/documents", split="train")
SFTTrainer("ours/model", args=SFTConfig("out"), train_dataset=dataset).train()
