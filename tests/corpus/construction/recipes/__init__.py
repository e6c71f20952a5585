from .trainers import SequenceTrainer
