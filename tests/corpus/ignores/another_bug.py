from trl import SFTConfig, SFTTrainer

# trl-hotfix: ignore[sft-formatting-func-ignored] we render the text before
SFTTrainer("gpt2", args=SFTConfig("out", packing=True)).train()
