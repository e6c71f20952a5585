from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("model")
reference = AutoModelForCausalLM.from_pretrained("model")
rows = load_dataset("json", data_files="pairs.jsonl", split="train")
args = DPOConfig(output_dir="dpo", beta=0.2, per_device_train_batch_size=2, gradient_accumulation_steps=8, bf16=True)
trainer = DPOTrainer(
    model,
    reference,
    args=args,
    train_dataset=rows,
    eval_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained("model"),
)
trainer.train()
