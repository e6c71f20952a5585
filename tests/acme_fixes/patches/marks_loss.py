from trl_hotfix.model import Outcome, Verdict


def mark(wrapped, instance, args, kwargs):
    return "patched"


def is_marked(leaf):
    try:
        said = object.__new__(leaf.DPOTrainer).dpo_loss(1, 2, 3, 4)
    except AttributeError:
        said = "raised"
    return Outcome(Verdict.FIXED if said == "patched" else Verdict.REPRODUCED)
