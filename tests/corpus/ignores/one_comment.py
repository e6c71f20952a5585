from trl import DPOConfig, DPOTrainer

# trl-hotfix: ignore[dpo-padding-free-wrong-terms] the baseline of the paper has it
DPOTrainer("gpt2", args=DPOConfig("out", padding_free=True, loss_type="ipo")).train()
