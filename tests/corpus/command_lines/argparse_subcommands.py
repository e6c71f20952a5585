import argparse

from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
sub = parser.add_subparsers(dest="command")
sft = sub.add_parser("sft")
sft.add_argument("--packing", action="store_true")
args = parser.parse_args()
SFTTrainer("gpt2", args=SFTConfig("out", packing=args.packing)).train()
