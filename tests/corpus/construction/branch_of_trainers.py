import sys

from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

stage = "sft" if len(sys.argv) < 50 else "dpo"
if stage == "sft":
    trainer = SFTTrainer("gpt2", args=SFTConfig("out", dataset_text_field="body"))
else:
    trainer = DPOTrainer("gpt2", args=DPOConfig("out"))
trainer.train()
