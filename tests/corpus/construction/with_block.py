from accelerate import PartialState
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

state = PartialState()
with state.main_process_first():
    dataset = load_dataset("trl-lib/Capybara", split="train")
    training_args = SFTConfig(output_dir="out", packing=True, max_length=512)

with state:
    trainer = SFTTrainer("gpt2", training_args, train_dataset=dataset)
    trainer.train()
