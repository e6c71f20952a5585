from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

RewardTrainer("ours/model", args=RewardConfig("out"), train_dataset=load_dataset("ours/pairs")).train()
