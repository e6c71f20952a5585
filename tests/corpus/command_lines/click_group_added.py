import click
from trl import SFTConfig, SFTTrainer


@click.command()
@click.option("--packing", is_flag=True, default=True)
def sft(packing):
    SFTTrainer("gpt2", args=SFTConfig("out", packing=packing)).train()


cli = click.Group()
cli.add_command(sft)
cli(standalone_mode=False)
