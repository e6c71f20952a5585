from trl import DPOConfig, DPOTrainer

losses = ["sigmoid"]
losses += ["sft"]
DPOTrainer("gpt2", args=DPOConfig("out", padding_free=True, loss_type=losses)).train()
