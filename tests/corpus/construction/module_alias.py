import trl as t
from trl.trainer import sft_trainer as st

t.DPOTrainer("gpt2", args=t.DPOConfig("out", precompute_ref_log_probs=True), eval_dataset=[1]).train()
st.SFTTrainer("gpt2", args=t.SFTConfig("out", packing=False)).train()
