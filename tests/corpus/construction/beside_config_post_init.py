import ourtrainers
from trl import DPOTrainer

args = ourtrainers.PairConfig(output_dir="out", beta=0.2)
DPOTrainer("gpt2", args=args).train()
