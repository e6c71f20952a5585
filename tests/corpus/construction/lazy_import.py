def train(model_name, out="out"):
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(model=model_name, args=SFTConfig(output_dir=out, padding_free=True))
    trainer.train()
    return trainer


if __name__ == "__main__":
    train("gpt2")
