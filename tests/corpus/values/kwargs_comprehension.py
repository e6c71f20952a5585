from trl import SFTConfig, SFTTrainer

raw = {"PACKING": True, "OUTPUT_DIR": "o"}
SFTTrainer("gpt2", args=SFTConfig(**{k.lower(): v for k, v in raw.items()})).train()
