"""Fields that generating endpoints share besides sampling: delivery, and those without effect."""

from dataclasses import dataclass

from http_gateway.fields import Fields

# They help OpenAI to bill, to cache, or to find abuse.
WITHOUT_EFFECT = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """How an answer is delivered."""

    is_stream: bool
    has_usage: bool  # in the stream


def drop_without_effect(fields: Fields) -> dict[str, str]:
    """Take the fields without effect; return the metadata, which some answers repeat."""
    fields.drop(*WITHOUT_EFFECT)
    return fields.texts("metadata")


def take_stream_options(fields: Fields) -> StreamOptions:
    """Take the fields for the delivery of an answer."""
    is_stream, options = take_stream(fields)
    has_usage = options.flag("include_usage")
    options.refuse_others()
    return StreamOptions(is_stream=is_stream, has_usage=has_usage)


def take_stream(fields: Fields) -> tuple[bool, Fields]:
    """Return whether an answer is streamed, and the stream options that not all endpoints have."""
    is_stream, is_given = fields.flag("stream"), fields.has("stream_options")
    options = fields.object("stream_options")
    if options.flag("include_obfuscation"):
        raise options.refused("include_obfuscation", "true", "false: nothing is padded")
    if is_given and not is_stream:
        raise fields.refused("stream_options", "options", "absent where stream is not true")
    return is_stream, options
