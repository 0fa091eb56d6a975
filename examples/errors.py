"""The error of the recipe."""


class InputError(ValueError):
    """What the user gave cannot work; the message says why and what to do, so no traceback need be shown."""
