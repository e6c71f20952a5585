from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer("gpt2", args=SFTConfig("out", label_smoothing_factor=0.1))
trainer.args.gradient_accumulation_steps = 8
trainer.train()
