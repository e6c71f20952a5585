from trl import DPOConfig, DPOTrainer

make = lambda **given: DPOConfig("out", padding_free=True, **given)  # noqa: E731
DPOTrainer("gpt2", args=make(loss_type="ipo")).train()
