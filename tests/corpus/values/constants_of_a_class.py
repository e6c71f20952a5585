from trl import SFTConfig, SFTTrainer


class Config:
    output_dir = "out"
    packing = True


given = {name: value for name, value in vars(Config).items() if not name.startswith("_")}
SFTTrainer("gpt2", args=SFTConfig(**given)).train()
