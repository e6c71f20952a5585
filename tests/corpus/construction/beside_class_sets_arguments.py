from ourtrainers import HouseTrainer
from trl import DPOConfig

HouseTrainer("gpt2", args=DPOConfig(output_dir="out", loss_type="ipo")).train()
