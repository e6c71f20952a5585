from trl import DPOConfig, DPOTrainer


def make_trainer(model):
    return DPOTrainer(model, args=DPOConfig(output_dir="out", padding_free=True, loss_type="ipo"))
