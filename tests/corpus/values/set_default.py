from trl import SFTConfig, SFTTrainer


def train(model, **options):
    options.setdefault("packing", True)
    options.pop("seed", None)
    SFTTrainer(model, args=SFTConfig("out", **options)).train()


train("gpt2", seed=1)
