from trl import SFTConfig, SFTTrainer


class Builder:
    def __init__(self):
        self.kw = {}

    def set(self, **k):
        self.kw.update(k)
        return self

    def build(self):
        return SFTTrainer("gpt2", args=SFTConfig("out", **self.kw))


Builder().set(packing=True).build().train()
