from trl import SFTConfig, SFTTrainer

first, second = SFTConfig("a", packing=True), SFTConfig("b")
first, second = second, first
SFTTrainer("gpt2", args=first).train()
SFTTrainer("gpt2", args=second).train()
