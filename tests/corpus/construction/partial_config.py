from functools import partial

from trl import DPOConfig, DPOTrainer

make_args = partial(DPOConfig, output_dir="out", padding_free=True)
args = make_args(loss_type="ipo", beta=0.05)
DPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args).train()
