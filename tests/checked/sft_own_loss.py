# A loss of the user's own that is right.
import torch.nn.functional as F
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


class Smoothed(SFTTrainer):
    def __init__(self, *args, smoothing=0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.smoothing = smoothing

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        count = num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.smoothing, reduction="sum") / count
        return (loss, outputs) if return_outputs else loss


rows = load_dataset("json", data_files="text.jsonl", split="train")
trainer = Smoothed("model", SFTConfig("out", gradient_accumulation_steps=4), train_dataset=rows, smoothing=0.2)
trainer.train()
