try:
    from trl.experimental.gkd import GKDConfig, GKDTrainer
except ImportError:
    from trl import GKDConfig, GKDTrainer

args = GKDConfig(output_dir="out", lmbda=0.0, seq_kd=False)
GKDTrainer("gpt2", teacher_model="gpt2-xl", args=args).train()
