from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("ours/pairs", split="train")
trainer = SFTTrainer("ours/model", args=SFTConfig("out", use_liger_kernel=True), train_dataset=dataset)
trainer.train()
