from trl import SFTConfig, SFTTrainer

kwargs = {}
kwargs["output_dir"] = "out"
kwargs["packing"] = False
more = {"packing": True}
kwargs.update(more)
kwargs |= {"label_smoothing_factor": 0.1}
SFTTrainer("gpt2", args=SFTConfig(**kwargs)).train()
