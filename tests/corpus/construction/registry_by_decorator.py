"""Trainers register themselves by a name, as in many in-house frameworks."""
from trl import SFTConfig, SFTTrainer

REGISTRY = {}


def register(name):
    def add(cls):
        REGISTRY[name] = cls
        return cls

    return add


@register("weighted_sft")
class WeightedTrainer(SFTTrainer):
    def log(self, logs, *rest):
        return super().log(logs, *rest)


job = {"trainer": "weighted_sft", "model": "gpt2"}
REGISTRY[job["trainer"]](job["model"], args=SFTConfig("out", packing=True)).train()
