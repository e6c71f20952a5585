from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("model", torch_dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("model")
dataset = load_dataset("json", data_files="text.jsonl", split="train")

trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=4, bf16=True),
    train_dataset=dataset,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("out/final")
