"""What a request is refused with: a status, and the error object that OpenAI's clients read."""

from collections.abc import Mapping


class ApiError(Exception):
    """An answer that is no completion.

    Attributes:
        status: of HTTP: 400, 401, 404, 405, 408, 413, 429, 500 or 503.
        message: what is wrong, the value, the rule, the way out.
        param: the field of the body that is wrong.
        code: a word that programs can test.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error."""
        return TYPES.get(self.status, "invalid_request_error")

    @property
    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": told}


TYPES: Mapping[int, str] = {
    401: "authentication_error",
    408: "timeout",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


def bad(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """Return the refusal of a body (400)."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str, retry_after_s: int = 1) -> ApiError:
    """Return what is said when the server cannot answer now (503), and when to ask again."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, code=code, headers=headers)
