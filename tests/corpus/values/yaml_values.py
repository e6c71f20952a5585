import pathlib

import yaml
from trl import DPOConfig, DPOTrainer

config = yaml.safe_load(pathlib.Path(__file__).with_name("settings.yaml").read_text())
args = DPOConfig(**config["training"])
DPOTrainer(config["model"], args=args).train()
