from trl import DPOConfig, DPOTrainer


class OurConfig(DPOConfig):
    def __init__(self, out, **given):
        super().__init__(output_dir=out, padding_free=True, **given)


DPOTrainer("gpt2", args=OurConfig("out", loss_type="ipo")).train()
