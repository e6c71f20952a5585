from dataclasses import dataclass

from datasets import load_dataset
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser


@dataclass
class Paths:
    rows: str = "chat.jsonl"


if __name__ == "__main__":
    paths, training, model = TrlParser((Paths, SFTConfig, ModelConfig)).parse_args_and_config()
    training.logging_steps = 20
    training.model_init_kwargs = {"attn_implementation": model.attn_implementation}
    trainer = SFTTrainer(
        model.model_name_or_path,
        args=training,
        train_dataset=load_dataset("json", data_files=paths.rows, split="train"),
    )
    trainer.train()
