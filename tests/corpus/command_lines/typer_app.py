import typer
from trl import GRPOConfig, GRPOTrainer

app = typer.Typer()


@app.command()
def train(beta: float = 0.04, loss_type: str = "grpo"):
    GRPOTrainer("gpt2", reward_funcs=len, args=GRPOConfig("out", beta=beta, loss_type=loss_type)).train()


if __name__ == "__main__":
    app()
