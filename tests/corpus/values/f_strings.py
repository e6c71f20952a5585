from trl import DPOConfig, DPOTrainer

kind = "i"
run = f"dpo-{kind}"
args = DPOConfig(output_dir=f"out/{run}", run_name=run, loss_type=f"{kind}po", padding_free=True)
DPOTrainer(f"Qwen/Qwen2.5-{1 / 2}B", args=args).train()
