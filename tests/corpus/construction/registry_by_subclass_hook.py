from trl import DPOConfig, DPOTrainer


class Registered:
    known = {}

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Registered.known[cls.__name__.lower()] = cls


class PairTrainer(Registered, DPOTrainer):
    pass


Registered.known["pairtrainer"]("gpt2", args=DPOConfig("out", padding_free=True, loss_type="ipo")).train()
