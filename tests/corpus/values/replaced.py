import copy
import dataclasses

from trl import GRPOConfig, GRPOTrainer

base = GRPOConfig("out", beta=0.0)
with_kl = dataclasses.replace(base, beta=0.04, loss_type="grpo")
twin = copy.deepcopy(with_kl)
twin.beta = 0.0
for config in (base, with_kl, twin):
    GRPOTrainer("gpt2", len, config).train()
GRPOTrainer("gpt2", len, with_kl).train()
