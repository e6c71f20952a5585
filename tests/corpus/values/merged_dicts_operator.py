from trl import SFTConfig, SFTTrainer

defaults = {"output_dir": "out", "packing": True}
settings = defaults | {"packing": False, "max_length": 512}
SFTTrainer("gpt2", args=SFTConfig(**settings)).train()
settings |= {"packing": True}
SFTTrainer("gpt2", args=SFTConfig(**settings)).train()
