import click
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


@click.group()
def cli():
    pass


@cli.command()
@click.option("--packing", is_flag=True)
def sft(packing):
    SFTTrainer("gpt2", args=SFTConfig("out", packing=packing)).train()


@cli.command()
@click.option("--loss", default="ipo")
def dpo(loss):
    DPOTrainer("gpt2", args=DPOConfig("out", padding_free=True, loss_type=loss)).train()


cli(standalone_mode=False)
