"""Patches of GKD, GOLD and the distillation trainers."""
