from ourtrainers import HouseConfig
from trl import SFTTrainer

trainer = SFTTrainer(model="gpt2", args=HouseConfig(output_dir="out", learning_rate=1e-5))
trainer.train()
