from trl import SFTConfig, SFTTrainer  # noqa: F401

kind = "SFT"
config = globals()[f"{kind}Config"](output_dir="out", packing=True)
globals()[f"{kind}Trainer"]("gpt2", args=config).train()
