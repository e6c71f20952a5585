from ourtrainers import MaskedTrainer
from trl import SFTConfig

args = SFTConfig(output_dir="out", packing=True)
trainer = MaskedTrainer("gpt2", args=args)
trainer.train()
