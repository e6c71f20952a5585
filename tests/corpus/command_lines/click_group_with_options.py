import click
from trl import SFTConfig, SFTTrainer


@click.group()
@click.option("--packing", is_flag=True)
@click.pass_context
def cli(ctx, packing):
    ctx.obj = {"packing": packing}


@cli.command()
@click.pass_obj
def sft(obj):
    SFTTrainer("gpt2", args=SFTConfig("out", packing=obj["packing"])).train()


cli(standalone_mode=False)
