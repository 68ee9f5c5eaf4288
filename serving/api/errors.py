"""What goes wrong with a request, and whose fault it is."""


class RequestError(ValueError):
    """A request that cannot be served: one line that names the field, the value and what would be right."""

    def __init__(self, param: str, message: str):
        super().__init__(param, message)  # both, so that it pickles and copies
        self.param = param
        self.message = message

    def __str__(self) -> str:
        return f"{self.param}: {self.message}"


class TooLong(RequestError):
    """A prompt that is longer than the model reads."""


class QueueFull(RequestError):
    """As many requests wait as may: the same one can be served later."""


class NotServing(RequestError):
    """The engine is asleep or closed: no request can be served now."""


class EngineError(RuntimeError):
    """The engine failed on a request that it had accepted."""
