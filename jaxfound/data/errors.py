"""The one error of the data room."""


class DataError(ValueError):
    """Unusable text or prepared data: names the place, the fault, the rule and the way out."""
