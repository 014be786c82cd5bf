"""What goes wrong with a model."""


class ModelError(ValueError):
    """The model can't be used: one line that says what, why and what to do. Processes exit with code 2."""
