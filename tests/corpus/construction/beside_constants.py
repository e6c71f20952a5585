from ourtrainers import BASE
from trl import SFTConfig, SFTTrainer

SFTTrainer("gpt2", args=SFTConfig(**BASE)).train()
