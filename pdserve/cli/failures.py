"""What the client's errors are in the one line that a command fails with."""

from pdserve.client.errors import BadResponse, ClientError, NoConnection, ServerError
from pdserve.core.errors import ErrorCode, PdserveError


def told(error: ClientError) -> PdserveError:
    """The same failure, with what to do about it."""
    match error:
        case ServerError():
            code = ErrorCode(error.code) if error.code in set(ErrorCode) else ErrorCode.internal
            return PdserveError(code, str(error))
        case NoConnection():
            return PdserveError(ErrorCode.worker_lost, f"{error}: is `pdserve up` running there?")
        case BadResponse():
            return PdserveError(ErrorCode.internal, f"{error}: check the URL")
    return PdserveError(ErrorCode.worker_lost, str(error))
