from trl import SFTConfig, SFTTrainer


def for_long_context(config):
    config.packing = True
    config.max_length = 32768
    return config


args = SFTConfig("out", packing=False)
for_long_context(args)
SFTTrainer("gpt2", args=args).train()
