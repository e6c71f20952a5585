"""Patches of the trainers that generate and judge: Online DPO, XPO, Nash-MD, PPO."""
