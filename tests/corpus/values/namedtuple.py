from typing import NamedTuple

from trl import SFTConfig, SFTTrainer


class S(NamedTuple):
    packing: bool = False


SETTINGS = S(packing=True)
SFTTrainer("gpt2", args=SFTConfig("out", packing=SETTINGS.packing)).train()
