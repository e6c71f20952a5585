import shared_changes
from trl import SFTConfig, SFTTrainer

args = SFTConfig("out")
shared_changes.for_long_context(args)
SFTTrainer("gpt2", args=args).train()
