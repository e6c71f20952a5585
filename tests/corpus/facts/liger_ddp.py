from trl import DPOConfig, DPOTrainer

DPOTrainer("gpt2", args=DPOConfig("out", use_liger_loss=True)).train()
