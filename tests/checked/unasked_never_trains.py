from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rows = load_dataset("json", data_files="text.jsonl", split="train")
trainer = SFTTrainer("model", args=SFTConfig("out"), train_dataset=rows, eval_dataset=rows)
print(trainer.evaluate())
