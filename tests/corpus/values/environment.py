import os

from trl import SFTConfig, SFTTrainer

PACKING = os.environ.get("PACKING", "0") == "1"
STEPS = int(os.getenv("ACCUMULATE", "1"))
args = SFTConfig("out", packing=PACKING, gradient_accumulation_steps=STEPS, label_smoothing_factor=0.1)
SFTTrainer("gpt2", args=args).train()
