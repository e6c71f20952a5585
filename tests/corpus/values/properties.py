from trl import DPOConfig, DPOTrainer


class Recipe:
    def __init__(self, long):
        self.long = long

    @property
    def loss(self):
        return "ipo" if self.long else "sigmoid"

    @property
    def args(self):
        return DPOConfig("out", padding_free=True, loss_type=self.loss)


recipe = Recipe(long=True)
DPOTrainer("gpt2", args=recipe.args).train()
