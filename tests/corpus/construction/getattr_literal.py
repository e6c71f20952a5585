import trl

Trainer = getattr(trl, "DPOTrainer")
Config = getattr(trl, "DPOConfig")
trainer = Trainer("gpt2", args=Config(output_dir="out", padding_free=True, use_weighting=True))
trainer.train()
