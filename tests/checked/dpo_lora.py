from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

base = AutoModelForCausalLM.from_pretrained("model", load_in_8bit=True)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
DPOTrainer(
    model,
    args=DPOConfig("dpo", loss_type="ipo", per_device_train_batch_size=4),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained("model"),
).train()
