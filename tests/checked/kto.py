from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer

KTOTrainer(
    AutoModelForCausalLM.from_pretrained("model"),
    args=KTOConfig("kto", per_device_train_batch_size=4, gradient_accumulation_steps=2),
    train_dataset=load_dataset("json", data_files="labelled.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained("model"),
).train()
