from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def build_args(seq_len=2048):
    return SFTConfig(output_dir="out", max_length=seq_len, packing=False, gradient_accumulation_steps=8)


def build_trainer(model, dataset=None):
    return SFTTrainer(model, args=build_args(), train_dataset=dataset, peft_config=LoraConfig(r=16))


if __name__ == "__main__":
    trainer = build_trainer("Qwen/Qwen2.5-0.5B")
    trainer.train()
    trainer.save_model("out/final")
