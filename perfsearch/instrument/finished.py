"""What ends a script whose window is full. No torch here."""


class Finished(SystemExit):
    """The window is full: the script has done what it was started for."""
