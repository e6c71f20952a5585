from trl import RewardConfig, RewardTrainer


def fit(model, trainer_class=RewardTrainer, **config):
    trainer = trainer_class(model, args=RewardConfig(output_dir="out", **config))
    trainer.train()


fit("gpt2", gradient_accumulation_steps=4)
