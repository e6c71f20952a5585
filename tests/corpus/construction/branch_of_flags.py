import os

from trl import SFTConfig, SFTTrainer

if os.environ.get("DEBUG"):
    args = SFTConfig(output_dir="debug", packing=False, max_steps=10)
else:
    args = SFTConfig(output_dir="out", packing=True)

trainer = SFTTrainer(model="gpt2", args=args)
trainer.train()
