from trl import DPOConfig, DPOTrainer

args = DPOConfig("out", padding_free=True)
setattr(args, "loss_type", "ipo")
DPOTrainer("gpt2", args=args).train()

args = DPOConfig("out", loss_type="ipo")
vars(args)["padding_free"] = True
DPOTrainer("gpt2", args=args).train()
