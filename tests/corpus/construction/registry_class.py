from trl import SFTConfig, SFTTrainer


class Registry:
    def __init__(self):
        self.items = {}

    def register(self, name, cls):
        self.items[name] = cls

    def build(self, name, *a, **k):
        return self.items[name](*a, **k)


R = Registry()
R.register("sft", SFTTrainer)
R.build("sft", "gpt2", args=SFTConfig("out", packing=True)).train()
