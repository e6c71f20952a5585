from trl import OnlineDPOConfig, OnlineDPOTrainer

args = OnlineDPOConfig("out", gradient_accumulation_steps=4, deepspeed="zero2_offload.json")
OnlineDPOTrainer("gpt2", args=args, judge=len).train()
