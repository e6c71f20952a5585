# Wrong: the loss of a step grows with the accumulated micro-batches.
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


class Louder(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        found = super().compute_loss(model, inputs, return_outputs=return_outputs)
        scale = self.args.gradient_accumulation_steps
        return (found[0] * scale, *found[1:]) if return_outputs else found * scale


Louder(
    AutoModelForCausalLM.from_pretrained("model"),
    args=DPOConfig("dpo", gradient_accumulation_steps=8, per_device_train_batch_size=1),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained("model"),
).train()
