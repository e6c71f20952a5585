from dataclasses import dataclass, field

from trl import SFTConfig, SFTTrainer


@dataclass
class Mine(SFTConfig):
    packing: bool = field(default=True, metadata={"help": "x"})


SFTTrainer("gpt2", args=Mine("out")).train()
