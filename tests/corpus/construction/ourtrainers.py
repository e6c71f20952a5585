"""Beside the scripts: classes that they import."""
from dataclasses import dataclass

from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class MaskedTrainer(SFTTrainer):
    def evaluate(self, *given, **named):
        return super().evaluate(*given, **named)


class HouseTrainer(DPOTrainer):
    def __init__(self, *given, **named):
        named["args"].padding_free = True
        super().__init__(*given, **named)


@dataclass
class HouseConfig(SFTConfig):
    packing: bool = True
    dataset_text_field: str = "body"


@dataclass
class PairConfig(DPOConfig):
    padding_free: bool = True

    def __post_init__(self):
        self.loss_type = "ipo"
        super().__post_init__()


class Session:
    def __init__(self, model):
        self.trainer = SFTTrainer(model, args=HouseConfig(output_dir="out"))

    def go(self):
        self.trainer.train()


def default_args():
    return SFTConfig(output_dir="out", packing=True)


BASE = {"output_dir": "out", "packing": True}
