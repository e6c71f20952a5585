from trl import DPOConfig, DPOTrainer


class Jobs:
    @staticmethod
    def preference(model, **overrides):
        args = DPOConfig(output_dir="out", **overrides)
        return DPOTrainer(model, args=args)


Jobs.preference("gpt2", padding_free=True, rpo_alpha=1.0).train()
