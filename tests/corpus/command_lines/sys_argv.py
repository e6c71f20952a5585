import sys

from trl import SFTConfig, SFTTrainer

packing = "--packing" in sys.argv
model = sys.argv[1] if len(sys.argv) > 1 else "gpt2"
SFTTrainer(model, args=SFTConfig("out", packing=packing)).train()
