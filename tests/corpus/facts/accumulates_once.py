from trl import SFTConfig, SFTTrainer

SFTTrainer("Qwen/Qwen2.5-7B", args=SFTConfig("out", gradient_accumulation_steps=1)).train()
