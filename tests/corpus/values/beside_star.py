from shared_settings import *
from trl import SFTConfig, SFTTrainer

SFTTrainer("gpt2", args=SFTConfig("out", packing=PACKING)).train()
