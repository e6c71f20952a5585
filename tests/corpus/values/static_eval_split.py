from trl import DPOConfig, DPOTrainer


class Data:
    @staticmethod
    def split(name):
        return {"train": [1, 2]}.get(name)


args = DPOConfig("out", precompute_ref_log_probs=True)
DPOTrainer("gpt2", args=args, train_dataset=Data.split("train"), eval_dataset=Data.split("test")).train()
