import sys

import trl

sys.modules["trl"].SFTTrainer("gpt2", args=trl.SFTConfig("out", packing=True)).train()
