"""Worker processes: the controller side starts and ends them, the rank side measures."""
