"""The generated part of the site: ``generate`` is the hook of mkdocs, and asks the others for their pages."""
