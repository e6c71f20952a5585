"""What makes committed files and the site: ``pages`` is the site, the rest a record, a page or a picture each."""
