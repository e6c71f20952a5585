from hydra import compose, initialize
from trl import SFTConfig, SFTTrainer

with initialize(config_path="conf", version_base=None):
    cfg = compose(config_name="sft", overrides=["training.packing=false", "+training.label_smoothing_factor=0.1"])
SFTTrainer("gpt2", args=SFTConfig(**cfg.training)).train()
