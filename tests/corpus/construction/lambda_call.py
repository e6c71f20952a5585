from trl import SFTConfig, SFTTrainer

make = lambda **k: SFTTrainer("gpt2", args=SFTConfig("o", **k))
make(packing=True).train()
