from trl import DPOConfig, DPOTrainer

args = DPOConfig("out", padding_free=True, loss_type="ipo", use_liger_loss=True)
DPOTrainer("gpt2", args=args).train()
# trl-hotfix: ignore[dpo-padding-free-wrong-terms, dpo-padding-free-liger] both runs are compared with one another
