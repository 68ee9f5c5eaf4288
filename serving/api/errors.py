"""Errors of requests and of the engine."""


class RequestError(ValueError):
    """A request cannot be served: one line with the field, the value and what would be right."""

    def __init__(self, param: str, message: str):
        super().__init__(param, message)  # both, so that it can be pickled and copied
        self.param = param
        self.message = message

    def __str__(self) -> str:
        return f"{self.param}: {self.message}"


class TooLong(RequestError):
    """A prompt exceeds the model's maximum length."""


class QueueFull(RequestError):
    """The waiting queue is full: the same request can be served later."""


class NotServing(RequestError):
    """The engine is asleep or closed and serves no request now."""


class EngineError(RuntimeError):
    """The engine failed on a request that it had accepted."""
