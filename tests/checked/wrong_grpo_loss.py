# Wrong: the loss is divided by the width of the micro-batch, its padding included.
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


class ByWidth(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss / inputs["completion_ids"].shape[1]


ByWidth(
    "model",
    reward_funcs=lambda completions, **kwargs: [float(len(one[0]["content"])) for one in completions],
    args=GRPOConfig("grpo", num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=2,
                    loss_type="dr_grpo"),
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
).train()
