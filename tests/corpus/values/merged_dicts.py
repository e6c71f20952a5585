from trl import DPOConfig, DPOTrainer

base = {"output_dir": "out", "padding_free": True, "loss_type": "sigmoid"}
long = {"max_length": 4096}
override = dict(loss_type="ipo")
DPOTrainer("gpt2", args=DPOConfig(**{**base, **long, **override})).train()
