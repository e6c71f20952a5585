from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("model")
first = SFTTrainer(
    "model",
    args=SFTConfig("first"),
    train_dataset=load_dataset("json", data_files="text.jsonl", split="train"),
    processing_class=tokenizer,
)
first.train()
first.save_model("first/final")
tokenizer.save_pretrained("first/final")

second = DPOTrainer(
    AutoModelForCausalLM.from_pretrained("first/final"),
    args=DPOConfig("second", gradient_accumulation_steps=4, per_device_train_batch_size=2),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    processing_class=tokenizer,
)
second.train()
