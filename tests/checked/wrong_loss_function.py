# Wrong: the loss is a mean of each micro-batch, and transformers does not divide it.
import torch.nn.functional as F
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


def focal(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    weights = (1 - (-losses).exp()) ** 2
    return (weights * losses).sum() / (labels != -100).sum()


SFTTrainer(
    "model",
    args=SFTConfig("out", gradient_accumulation_steps=4),
    train_dataset=load_dataset("json", data_files="text.jsonl", split="train"),
    compute_loss_func=focal,
).train()
