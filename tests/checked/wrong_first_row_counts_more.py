# Wrong: a curriculum by the place of a row in its batch, which is chance.
import torch
import torch.nn.functional as F
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


class Curriculum(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        losses = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none")
        weights = torch.linspace(2, 1, len(losses))[:, None]
        loss = (weights * losses).sum() / (inputs["labels"] != -100).sum()
        return (loss, outputs) if return_outputs else loss


Curriculum(
    "model",
    args=SFTConfig("out"),
    train_dataset=load_dataset("json", data_files="text.jsonl", split="train"),
).train()
