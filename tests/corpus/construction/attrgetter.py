import operator

import trl

make = operator.attrgetter("SFTTrainer")(trl)
make("gpt2", args=trl.SFTConfig("out", packing=True)).train()
