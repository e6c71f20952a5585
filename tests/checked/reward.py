from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForSequenceClassification.from_pretrained("model", num_labels=1)
model.config.pad_token_id = tokenizer.pad_token_id
rows = load_dataset("json", data_files="pairs.jsonl", split="train")
rows = rows.map(lambda row: {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}, remove_columns="prompt")
RewardTrainer(
    model,
    args=RewardConfig("reward", max_length=128, gradient_accumulation_steps=4, per_device_train_batch_size=2),
    train_dataset=rows,
    processing_class=tokenizer,
).train()
