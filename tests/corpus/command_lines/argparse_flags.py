import argparse

from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpt2")
parser.add_argument("--packing", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
options = parser.parse_args()

args = SFTConfig(output_dir="out", packing=options.packing, gradient_accumulation_steps=options.accumulate)
SFTTrainer(options.model, args=args).train()
