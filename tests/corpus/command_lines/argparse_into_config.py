import argparse

from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--beta", type=float, default=0.0)
parser.add_argument("--loss_type", default="dapo")
args = GRPOConfig(output_dir="out", **vars(parser.parse_args()))
GRPOTrainer("gpt2", reward_funcs=len, args=args).train()
