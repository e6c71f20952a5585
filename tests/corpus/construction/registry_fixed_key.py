from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

RECIPES = {
    "reward": (RewardTrainer, RewardConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
}
trainer_class, config_class = RECIPES["grpo"]
args = config_class(output_dir="out", loss_type="grpo", beta=0.04)
trainer_class("gpt2", reward_funcs=len, args=args).train()
