from trl import SFTConfig, SFTTrainer

args = config = SFTConfig("out")
config.packing = True
SFTTrainer("gpt2", args=args).train()
