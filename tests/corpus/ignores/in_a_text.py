"""A comment in a text accepts nothing:

# trl-hotfix: ignore[sft-padding-free-contamination] it is only written about
"""
from trl import SFTConfig, SFTTrainer

SFTTrainer("gpt2", args=SFTConfig("out", packing=True)).train()
