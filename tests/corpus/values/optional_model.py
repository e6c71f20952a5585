from peft import get_peft_model, LoraConfig
from transformers import AutoModelForCausalLM
from trl import BEMACallback, DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("gpt2")
model = get_peft_model(model, LoraConfig())
args = DPOConfig("out", precompute_ref_log_probs=True)
trainer = DPOTrainer(model, None, args, eval_dataset=[1], callbacks=[BEMACallback()])
trainer.train()
