import argparse

from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--packing", type=int, default=0)
options = parser.parse_args()
if options.packing == 0:
    options.packing = 1
SFTTrainer("gpt2", args=SFTConfig("out", packing=bool(options.packing))).train()
