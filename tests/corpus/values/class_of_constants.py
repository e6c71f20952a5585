from trl import DPOConfig, DPOTrainer


class Defaults:
    BETA = 0.1
    LOSS = "ipo"
    FREE = True


DPOTrainer("gpt2", args=DPOConfig("out", beta=Defaults.BETA, loss_type=Defaults.LOSS, padding_free=Defaults.FREE)).train()
