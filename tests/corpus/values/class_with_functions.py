"""A helper gives the parts of a run, or nothing where a run has none."""
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


class Parts:
    lora = False

    @staticmethod
    def adapter():
        return LoraConfig(r=8) if Parts.lora else None

    @classmethod
    def evaluation(cls):
        return None


args = GRPOConfig("out", use_vllm=True, resume_from_checkpoint=None)
trainer = GRPOTrainer("gpt2", len, args, eval_dataset=Parts.evaluation(), peft_config=Parts.adapter())
trainer.train()
