from .commands.main import script

script()
