# Rewards that a small run on a CPU cannot ask, or that say nothing there.
import random
import urllib.request

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class Judge:
    __name__ = "judge"

    def __call__(self, prompts, completions, **kwargs):
        return [float(urllib.request.urlopen("http://127.0.0.1:9/judge").read()) for _ in completions]


def noisy(completions, **kwargs):
    return [len(one[0]["content"]) + random.random() for one in completions]


def right(completions, answer, **kwargs):
    return [float(expected in one[0]["content"]) for one, expected in zip(completions, answer)]


GRPOTrainer(
    AutoModelForCausalLM.from_pretrained("model"),
    reward_funcs=[Judge(), noisy, right],
    args=GRPOConfig("grpo", num_generations=4, per_device_train_batch_size=4, beta=0.04, loss_type="dr_grpo"),
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained("model"),
).train()
