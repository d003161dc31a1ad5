"""The list of models."""

import json

from pdserve.client.errors import BadResponse


def read_models(url: str, body: bytes) -> list[str]:
    """Names from the body of /v1/models, at least one.

    Raises:
        BadResponse: it is not that.
    """
    try:
        names = [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BadResponse(f"{url} lists its models in a way that is not OpenAI's API") from error
    if not names:
        raise BadResponse(f"{url} serves no model")
    return names
