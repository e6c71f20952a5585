from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig("out", steps_per_generation=4, gradient_accumulation_steps=4)
GRPOTrainer("ours/model", reward_funcs=len, args=args).train()
