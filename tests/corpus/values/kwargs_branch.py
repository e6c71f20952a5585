from trl import SFTConfig, SFTTrainer

fast = True
kwargs = dict(output_dir="out")
if fast:
    kwargs["packing"] = True
SFTTrainer("gpt2", args=SFTConfig(**kwargs)).train()
