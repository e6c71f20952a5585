from concurrent.futures import ThreadPoolExecutor

from trl import SFTConfig, SFTTrainer


def train(packing=False):
    SFTTrainer("gpt2", args=SFTConfig("out", packing=packing)).train()


with ThreadPoolExecutor(1) as pool:
    list(pool.map(train, [True]))
