from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

job = {"kind": "dpo", "free": True}
match job:
    case {"kind": "sft"}:
        trainer = SFTTrainer("gpt2", args=SFTConfig("out", packing=True))
    case {"kind": "dpo", "free": free}:
        trainer = DPOTrainer("gpt2", args=DPOConfig("out", padding_free=free, loss_type="ipo"))
trainer.train()
