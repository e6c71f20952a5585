"""Only sets the environment, and starts the real script."""
import os
import runpy

os.environ["WANDB_PROJECT"] = "alignment"
runpy.run_path(os.path.join(os.path.dirname(__file__), "lazy_import.py"), run_name="__main__")
