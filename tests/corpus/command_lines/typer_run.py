import typer
from trl import SFTConfig, SFTTrainer


def main(model: str = "gpt2", packing: bool = True, accumulate: int = typer.Option(1)):
    args = SFTConfig(output_dir="out", packing=packing, gradient_accumulation_steps=accumulate)
    SFTTrainer(model, args=args).train()


if __name__ == "__main__":
    typer.run(main)
