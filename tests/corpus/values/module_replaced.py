import functools

import trl

trl.SFTConfig = functools.partial(trl.SFTConfig, packing=True)
trl.SFTTrainer("gpt2", args=trl.SFTConfig("out")).train()
