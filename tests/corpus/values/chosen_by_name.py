"""The class is named in full, as in a config."""
import importlib

from trl import SFTConfig


def load(dotted):
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


load("trl.SFTTrainer")("gpt2", args=SFTConfig("out", packing=True)).train()
