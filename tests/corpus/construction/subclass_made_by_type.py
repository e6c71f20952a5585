from trl import SFTConfig, SFTTrainer


def loud_log(self, logs, *rest):
    print(logs)


LoudTrainer = type("LoudTrainer", (SFTTrainer,), {"log": loud_log})
LoudTrainer("gpt2", args=SFTConfig(output_dir="out", packing=True)).train()
