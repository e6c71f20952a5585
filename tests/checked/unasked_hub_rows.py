from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

SFTTrainer("model", args=SFTConfig("out"), train_dataset=load_dataset("some-org/some-rows", split="train")).train()
