"""Patches of the trainers of preferences and rewards: KTO, ORPO, CPO, BCO, TPO, Reward, PRM."""
