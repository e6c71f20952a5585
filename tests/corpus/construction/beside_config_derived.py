from dataclasses import dataclass

from ourtrainers import HouseConfig
from trl import SFTTrainer


@dataclass
class TeamConfig(HouseConfig):
    learning_rate: float = 3e-5


SFTTrainer("gpt2", args=TeamConfig(output_dir="out")).train()
