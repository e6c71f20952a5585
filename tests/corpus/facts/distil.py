from trl import GKDConfig, GKDTrainer

GKDTrainer("ours/model", teacher_model="ours/large", args=GKDConfig("out", lmbda=0.5)).train()
