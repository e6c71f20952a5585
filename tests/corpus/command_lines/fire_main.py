import fire
from trl import SFTConfig, SFTTrainer


def main(packing=False, field="text"):
    SFTTrainer("gpt2", args=SFTConfig("out", packing=packing, dataset_text_field=field)).train()


if __name__ == "__main__":
    fire.Fire(main)
