import functools

from trl import SFTConfig

SFTConfig.__init__ = functools.partialmethod(SFTConfig.__init__, packing=True)
