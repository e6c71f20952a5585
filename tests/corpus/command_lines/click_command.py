import click
from trl import SFTConfig, SFTTrainer


@click.command()
@click.option("--packing/--no-packing", default=False)
@click.option("--field", default="text")
def main(packing, field):
    args = SFTConfig(output_dir="out", packing=packing, dataset_text_field=field)
    SFTTrainer("gpt2", args=args).train()


if __name__ == "__main__":
    main(standalone_mode=False)
