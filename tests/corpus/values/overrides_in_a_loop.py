from trl import SFTConfig, SFTTrainer

overrides = {"packing": True, "dataset_text_field": "body"}
args = SFTConfig("out")
for name, value in overrides.items():
    if not hasattr(args, name):
        raise ValueError(name)
    setattr(args, name, value)
SFTTrainer("gpt2", args=args).train()
