from datasets import load_dataset
from trl import KTOConfig, KTOTrainer

KTOTrainer("ours/model", args=KTOConfig("out"), train_dataset=load_dataset("ours/labels")).train()
