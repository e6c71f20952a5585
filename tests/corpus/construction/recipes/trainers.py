from trl import SFTTrainer as _Base


class _Logged(_Base):
    pass


class SequenceTrainer(_Logged):
    """What the package exports."""
