from trl import SFTConfig, SFTTrainer


class Pipeline:
    trainer_cls = SFTTrainer

    def run(self):
        self.trainer_cls("gpt2", args=SFTConfig("out", packing=True)).train()


Pipeline().run()
