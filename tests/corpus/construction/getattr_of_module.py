import trl

name = "SFT"
config = getattr(trl, f"{name}Config")(output_dir="out", packing=True)
trainer = getattr(trl, f"{name}Trainer")("gpt2", args=config)
trainer.train()
