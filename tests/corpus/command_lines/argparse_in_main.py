import argparse

from trl import DPOConfig, DPOTrainer


def parse():
    parser = argparse.ArgumentParser(description="preference tuning")
    parser.add_argument("--loss-type", choices=["sigmoid", "ipo"], default="sigmoid")
    parser.add_argument("--no-padding", dest="padding_free", action="store_true")
    parser.add_argument("--beta", type=float, default=0.1)
    return parser.parse_args()


def main():
    given = parse()
    args = DPOConfig("out", beta=given.beta, loss_type=given.loss_type, padding_free=given.padding_free)
    DPOTrainer("gpt2", args=args).train()


if __name__ == "__main__":
    main()
