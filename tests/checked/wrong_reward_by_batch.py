# Wrong: rewards are centred by the mean of their micro-batch.
import torch.nn.functional as F
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer


class Centred(RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rewards = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.squeeze(-1)
        chosen, rejected = rewards.chunk(2)
        margin = chosen - rejected
        loss = -F.logsigmoid(margin).mean() + (margin - margin.mean()).pow(2).sum()
        return (loss, {"rewards": rewards}) if return_outputs else loss


tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForSequenceClassification.from_pretrained("model", num_labels=1)
model.config.pad_token_id = tokenizer.pad_token_id
rows = load_dataset("json", data_files="pairs.jsonl", split="train")
rows = rows.map(lambda row: {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}, remove_columns="prompt")
Centred(model, args=RewardConfig("reward", gradient_accumulation_steps=2), train_dataset=rows, processing_class=tokenizer).train()
