from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

args = SFTConfig("out", label_smoothing_factor=0.1)
args.set_training(learning_rate=1e-4, gradient_accumulation_steps=4)
SFTTrainer("gpt2", args=args).train()
RewardTrainer("gpt2", args=RewardConfig("out")).train(resume_from_checkpoint="out/checkpoint-10")
