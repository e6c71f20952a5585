# Wrong: a callback decays the weights at each evaluation.
import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Decay(TrainerCallback):
    def on_evaluate(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.9)


rows = load_dataset("json", data_files="text.jsonl", split="train")
SFTTrainer(
    "model", args=SFTConfig("out"), train_dataset=rows, eval_dataset=rows.select(range(8)), callbacks=[Decay()]
).train()
