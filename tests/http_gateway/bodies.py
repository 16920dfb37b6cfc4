"""The paths of generations over HTTP, and the least body of each."""

import json

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    TEXT: {"prompt": "x"},
    RESPONSE: {"input": "x"},
}


def body_of(path, **options):
    return json.dumps({**BODIES[path], **options})
