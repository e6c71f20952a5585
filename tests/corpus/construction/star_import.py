from transformers import AutoModelForCausalLM
from trl import *

model = AutoModelForCausalLM.from_pretrained("gpt2")
trainer = DPOTrainer(model=model, args=DPOConfig(output_dir="out", padding_free=True, ld_alpha=0.5))
trainer.train()
