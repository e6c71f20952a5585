from recipes import SequenceTrainer
from trl import SFTConfig

SequenceTrainer(model="gpt2", args=SFTConfig(output_dir="out", padding_free=True)).train()
