from trl import SFTConfig, SFTTrainer

PACKING = False


def long_context():
    global PACKING
    PACKING = True


long_context()
SFTTrainer("gpt2", args=SFTConfig("out", packing=PACKING)).train()
