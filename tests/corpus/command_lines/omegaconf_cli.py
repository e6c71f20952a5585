import os

from omegaconf import OmegaConf
from trl import DPOConfig, DPOTrainer

base = OmegaConf.load(os.path.join(os.path.dirname(__file__), "dpo.yaml"))
cfg = OmegaConf.merge(base, OmegaConf.from_cli())
args = DPOConfig(output_dir=cfg.output_dir, loss_type=cfg.loss_type, padding_free=cfg.padding_free)
DPOTrainer("gpt2", args=args).train()
