import pathlib

import yaml
from trl import SFTConfig, SFTTrainer

with pathlib.Path(__file__).with_name("settings.yaml").open() as file:
    settings = yaml.safe_load(file)
SFTTrainer(settings["model"], args=SFTConfig("out", packing=settings["training"]["padding_free"])).train()
