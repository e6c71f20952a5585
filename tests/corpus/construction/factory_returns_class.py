from trl import GRPOConfig, GRPOTrainer


def trainer_class(debug=False):
    if debug:
        print("debugging")
    return GRPOTrainer


config = GRPOConfig(output_dir="out", loss_type="dapo", beta=0.0)
trainer_class()("gpt2", [len], config).train()
