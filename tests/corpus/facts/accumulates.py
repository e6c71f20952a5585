from trl import SFTConfig, SFTTrainer

args = SFTConfig("out", gradient_accumulation_steps=8, bf16=True)
SFTTrainer("Qwen/Qwen2.5-7B", args=args).train()
