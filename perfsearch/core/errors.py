"""The one kind of error that is the user's to mend."""


class BadInputError(ValueError):
    """Something that was asked for cannot be done.

    The message is for people and complete: the key, its value, what is allowed, the next step.
    Commands print it alone and end with exit code 2; every other exception is a bug of ours.
    """
