from trl import DPOConfig, DPOTrainer

for beta in (0.05, 0.1, 0.5):
    for loss in ["sigmoid", "ipo"]:
        args = DPOConfig(output_dir=f"out/{loss}-{beta}", beta=beta, loss_type=loss, padding_free=True)
        DPOTrainer("gpt2", args=args).train()
