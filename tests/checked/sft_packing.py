from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    "model",
    args=SFTConfig("out", packing=True, max_length=2048, gradient_accumulation_steps=2),
    train_dataset=load_dataset("json", data_files="text.jsonl", split="train"),
)
trainer.train()
