import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

base = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.bfloat16)
named = PeftModel.from_pretrained(base, "adapter", adapter_name="policy", is_trainable=True)
GRPOTrainer(named, len, GRPOConfig("out", beta=0.04)).train()

plain = get_peft_model(base, LoraConfig(r=8))
GRPOTrainer(plain, len, GRPOConfig("out", beta=0.0)).train()
GRPOTrainer(base, len, GRPOConfig("out", beta=0.04)).train()
