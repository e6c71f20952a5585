import importlib

trl = importlib.import_module("trl")
args = trl.DPOConfig(output_dir="out", padding_free=True, loss_type="ipo")
trl.DPOTrainer("gpt2", args=args).train()
