import trl

TRAINERS = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer}
CONFIGS = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}


def main(kind="dpo"):
    config = CONFIGS[kind](output_dir="out")
    trainer = TRAINERS[kind](model="gpt2", args=config)
    trainer.train()


main()
