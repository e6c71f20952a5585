from trl import SFTConfig, SFTTrainer

args = SFTConfig("out", packing=False)
args.packing = not args.packing
SFTTrainer("gpt2", args=args).train()

args = SFTConfig("out", gradient_accumulation_steps=1, label_smoothing_factor=0.1)
args.gradient_accumulation_steps *= 4
SFTTrainer("gpt2", args=args).train()
