from trl import GRPOConfig, GRPOTrainer


class LoggingTrainer(GRPOTrainer):
    pass


class RewardShapingTrainer(LoggingTrainer):
    scale = 2.0


class FinalTrainer(RewardShapingTrainer):
    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)


config = GRPOConfig(output_dir="out", beta=0.1, loss_type="grpo")
FinalTrainer(model="Qwen/Qwen2.5-0.5B", reward_funcs=[len], args=config).train()
