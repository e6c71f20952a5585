from trl import GRPOConfig, GRPOTrainer

WORLD, BATCH, GLOBAL_BATCH = 1, 4, 32
accumulate = GLOBAL_BATCH // (WORLD * BATCH)
args = GRPOConfig(
    "out",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=accumulate,
    steps_per_generation=accumulate * 2,
    beta=1 / 25 if WORLD < 2 else 0,
)
trainer = GRPOTrainer("gpt2", len, args)
trainer.train(resume_from_checkpoint=True)
