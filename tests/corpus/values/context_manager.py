from contextlib import contextmanager

from trl import SFTConfig, SFTTrainer


@contextmanager
def changed(args, **k):
    for key, v in k.items():
        setattr(args, key, v)
    yield args


with changed(SFTConfig("out"), packing=True) as args:
    SFTTrainer("gpt2", args=args).train()
