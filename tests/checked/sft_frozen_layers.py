# The user freezes layers, and gives an optimizer of his own.
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("model")
for name, weight in model.named_parameters():
    weight.requires_grad = "layers.0." not in name
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

SFTTrainer(
    model,
    args=SFTConfig("out", completion_only_loss=True),
    train_dataset=load_dataset("json", data_files="completions.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained("model"),
    optimizers=(optimizer, schedule),
).train()
