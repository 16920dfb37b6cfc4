"""A model that answers what it is asked to: the text of the last [user] or [tool] message.

Behind a real router with a tokenizer and a chat template, it lets a test write the answer that it
wants to see into its question.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from pagewire.protos import common_pb2, worker_pb2
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from router.tokenizer import Tokenizer
from tests.router.scripted_worker import EOS, LENGTH, STOP, ScriptedWorker, Session
from tests.router.tokenizers_for_tests import byte_level

TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
MARKS = {  # what the template of a format shows the model
    "plain": "",
    "hermes": "{% if tools %}<tool_call>{% endif %}",
    "llama3_json": "{% if tools %}parameters<|start_header_id|>{% endif %}",
    "mistral": "{% if tools %}[TOOL_CALLS]{% endif %}",
    "reasoning": "{% if false %}<think>{% endif %}",
}
LAST_QUESTION = re.compile(r".*\[(?:user|tool)\](.*?)(?:\[assistant\])?$", re.DOTALL)


def write_folder(folder: Path, marks: str = "") -> Path:
    """Write a model folder: a byte-level tokenizer, and a template with some marks."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": marks + TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def parrot(folder: Path, *, token_s: float = 0.001, **fields: Any) -> ScriptedWorker:
    """Return the worker."""
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text())

    async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        prompt = tokenizer.decode(
            unpack_token_ids(submit.prompt_token_ids), skip_special_tokens=False
        )
        question = LAST_QUESTION.match(prompt)
        text = question[1] if question else prompt
        ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        ids = ids[: submit.sampling.max_tokens]
        for index, token_id in enumerate(ids):
            await asyncio.sleep(token_s)
            if submit.request_id in session.cancelled:
                return
            is_last = index == len(ids) - 1
            finish = STOP if ids[-1] == EOS else LENGTH
            session.send(
                *(
                    worker_pb2.TokenDelta(
                        request_id=submit.request_id,
                        attempt=submit.attempt,
                        choice=state.choice,
                        first_index=index,
                        token_ids=pack_token_ids([token_id]),
                        logprobs=_logprobs(submit.sampling, token_id),
                        finish_reason=finish if is_last else 0,
                        stats=common_pb2.RequestStats(cached_tokens=4),
                    )
                    for state in submit.choices
                )
            )

    fields.setdefault("max_context_tokens", 4096)
    return ScriptedWorker("decode-0", serve=serve, **fields)


def _logprobs(sampling: common_pb2.SamplingParams, token_id: int) -> list[common_pb2.TokenLogprobs]:
    if not sampling.HasField("logprobs"):
        return []
    top = [(token_id + i) % 300 for i in range(sampling.logprobs)]
    return [
        common_pb2.TokenLogprobs(
            logprob=-0.5,
            top_token_ids=pack_token_ids(top),
            top_logprobs=[-0.5 - i if i < 2 else -float("inf") for i in range(len(top))],
        )
    ]
