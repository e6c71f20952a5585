"""The trainer makes itself from a recipe."""
from trl import SFTConfig, SFTTrainer


class RecipeTrainer(SFTTrainer):
    @classmethod
    def from_recipe(cls, recipe):
        args = SFTConfig(output_dir=recipe["out"], packing=recipe["packing"])
        return cls(recipe["model"], args=args)


RecipeTrainer.from_recipe({"model": "gpt2", "out": "out", "packing": True}).train()
