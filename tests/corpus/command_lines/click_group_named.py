import click
from trl import SFTConfig, SFTTrainer


@click.group()
def cli():
    pass


@cli.command("train")
@click.option("--packing/--no-packing", default=True)
def sft(packing):
    SFTTrainer("gpt2", args=SFTConfig("out", packing=packing)).train()


if __name__ == "__main__":
    cli(standalone_mode=False)
