# Wrong: rows are cut to the shortest of their batch.
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer


def shortest(collate):
    def cut(rows):
        batch = collate(rows)
        width = int(batch["attention_mask"].sum(1).min())
        return {name: each[:, :width] if each.dim() == 2 else each for name, each in batch.items()}

    return cut


trainer = DPOTrainer(
    "model",
    args=DPOConfig("dpo", per_device_train_batch_size=4, gradient_accumulation_steps=2),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained("model"),
)
trainer.data_collator = shortest(trainer.data_collator)
trainer.train()
