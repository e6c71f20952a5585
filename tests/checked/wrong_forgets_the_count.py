# Wrong: compute_loss swallows num_items_in_batch, and the loss is no longer a mean over the step.
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


class Mine(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)

    def log(self, logs, *args, **kwargs):
        return super().log({**logs, "rate": self.args.learning_rate}, *args, **kwargs)


Mine(
    "model",
    args=SFTConfig("out", per_device_train_batch_size=2, gradient_accumulation_steps=8),
    train_dataset=load_dataset("json", data_files="text.jsonl", split="train"),
).train()
