import os

from omegaconf import OmegaConf
from trl import DPOConfig, DPOTrainer


def read(name):
    return OmegaConf.load(os.path.join(os.path.dirname(__file__), name))


cfg = read("dpo.yaml")
print(cfg)
args = DPOConfig(output_dir="out", loss_type=cfg["loss_type"], padding_free=cfg.get("padding_free", False))
DPOTrainer("gpt2", args=args).train()
