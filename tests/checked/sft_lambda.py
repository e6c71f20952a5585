# Closures and a class that takes other arguments than TRL's: nothing of it can be pickled.
from datasets import load_dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer


def build(rate, say=lambda text: None):
    class Chatty(SFTTrainer):
        def __init__(self, net, path):
            self.rows = load_dataset("json", data_files=path, split="train").filter(lambda row: len(row["text"]) > 3)
            settings = SFTConfig("out", learning_rate=rate, per_device_train_batch_size=8)
            super().__init__(model=net, args=settings, train_dataset=self.rows, callbacks=[Says()])

    class Says(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            say(f"step {state.global_step}")

    return Chatty(AutoModelForCausalLM.from_pretrained("model"), "text.jsonl")


build(1e-5).train()
