from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

stages = [
    (SFTTrainer, SFTConfig(output_dir="sft", packing=True)),
    (DPOTrainer, DPOConfig(output_dir="dpo")),
]
model = "gpt2"
for trainer_class, args in stages:
    trainer = trainer_class(model=model, args=args)
    trainer.train()
