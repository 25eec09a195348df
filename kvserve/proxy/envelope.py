"""What LiteLLM gets to see of a request: a plain body that it can route and log. The client's own body travels beside
it (exchange.py) and replaces it on the way out. Pure functions over JSON objects.
"""

from collections.abc import Mapping

from kvserve.errors import BadRequest

type JsonObject = Mapping[str, object]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def chat_envelope(body: JsonObject, default_model: str) -> dict[str, object]:
    """A chat request as LiteLLM sees it: model, stream and the newest message's text.

    The rest of a message it would rewrite (images, files, calls) or stumble over, and it copies what it gets so often
    that a whole history of 300 kB costs 65 ms. Raises BadRequest for a model that is no name.
    """
    messages = body.get("messages")
    newest = messages[-1:] if isinstance(messages, list) else []
    return {**_common(body, default_model), "messages": [_plain_message(message) for message in newest]}


def _common(body: JsonObject, default_model: str) -> dict[str, object]:
    """Model and stream. A mistyped `stream` is shown as absent, so that the backend refuses it in its own words."""
    envelope: dict[str, object] = {"model": _model_name(body, default_model)}
    if body.get("stream") is True:
        envelope["stream"] = True
        if isinstance(options := body.get("stream_options"), dict):
            envelope["stream_options"] = options
    return envelope


def _model_name(body: JsonObject, default_model: str) -> str:
    """The model's name. Raises BadRequest for one that LiteLLM would take for something else than a name."""
    name = body.get("model")
    if name is None or name == "":
        return default_model
    if not isinstance(name, str):
        raise BadRequest("model must be a string.", param="model")
    if "," in name or "://" in name:
        raise BadRequest("Through the proxy a model name has no comma and is no URL.", param="model")
    return name


def _plain_message(message: object) -> dict[str, object]:
    """Role and text of a message, however it is built."""
    if not isinstance(message, dict):
        return {"role": "user", "content": ""}
    role, content = message.get("role"), message.get("content")
    known_role = role if isinstance(role, str) and role in _ROLES else "user"
    if isinstance(content, list):
        return {"role": known_role, "content": [part for part in content if _is_text_part(part)]}
    return {"role": known_role, "content": content if isinstance(content, str) else ""}


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
