# Wrong: after an evaluation a layer stays frozen.
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


class Freezes(SFTTrainer):
    def evaluate(self, *args, **kwargs):
        for weight in self.model.get_input_embeddings().parameters():
            weight.requires_grad = False
        return super().evaluate(*args, **kwargs)


rows = load_dataset("json", data_files="text.jsonl", split="train")
Freezes("model", args=SFTConfig("out", eval_strategy="epoch"), train_dataset=rows, eval_dataset=rows).train()
