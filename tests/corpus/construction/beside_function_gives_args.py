from ourtrainers import default_args
from trl import SFTTrainer

SFTTrainer("gpt2", args=default_args()).train()
