"""POST /tokenize and /detokenize, as in vLLM."""

from functools import partial
from typing import Any

from http_gateway.exchange import Exchange
from http_gateway.fields import Fields, Unsupported
from http_gateway.messages import chat_field, read_messages, take_tools
from http_gateway.wire import RouterLink
from pagewire import Model
from pagewire.protos import inference_pb2
from pagewire.wire import detokenize_request, tokenize_chat_request, tokenize_request

# Not supported by generations either
_OF_CHAT = {
    "chat_template": Unsupported("the model's own is used"),
    "chat_template_kwargs": Unsupported("the chat template takes none", off=({},)),
}


class Tokens:
    """Turns text into tokens and back."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link

    async def tokenize(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Return the tokens of a prompt or a chat, as a generation takes them."""
        exchange.rename_field = chat_field
        model = await self._link.model(exchange.authorization)
        request, with_pieces = await exchange.convert(partial(_parse, body, model))
        token_ids = await self._link.tokenize(exchange.authorization, request)
        pieces = None
        if with_pieces:
            pieces = await self._link.pieces(exchange.authorization, model, token_ids)
        await exchange.answer_json(
            {
                "count": len(token_ids),
                "max_model_len": model.max_context_tokens,
                "tokens": token_ids,
                "token_strs": pieces,
            }
        )

    async def detokenize(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Return the text of tokens, special ones included."""
        exchange.rename_field = lambda name: name.replace("token_ids", "tokens", 1)
        fields = Fields(body)
        name = fields.text("model")
        token_ids = fields.take("tokens")
        fields.refuse_others()
        if token_ids is None:
            raise fields.refused("tokens", "none", "an array of token ids")
        request = await exchange.convert(partial(detokenize_request, token_ids, name, False))
        text = await self._link.detokenize(exchange.authorization, request)
        await exchange.answer_json({"prompt": text})


def _parse(body: dict[str, Any], model: Model) -> tuple[inference_pb2.TokenizeRequest, bool]:
    """Return the call of a request, and whether the text of each token is requested."""
    fields = Fields(body)
    name = fields.text("model")
    with_pieces = fields.flag("return_token_strs")
    if not fields.has("messages"):
        prompt = fields.take("prompt")
        adds_special = fields.flag("add_special_tokens", True)
        fields.refuse_others()
        if prompt is None:
            raise fields.refused("prompt", "none", "a string, or messages instead")
        request = tokenize_request(prompt, name, add_special_tokens=adds_special)
        return request, with_pieces
    fields.refuse_unsupported(_OF_CHAT)
    given = fields.array("messages")
    tools = take_tools(fields, model).shown
    continues = fields.flag("continue_final_message")
    begins = fields.flag("add_generation_prompt", not continues)
    adds_special = fields.flag("add_special_tokens", False)
    fields.refuse_others()
    request = tokenize_chat_request(
        read_messages(given),
        tools,
        name,
        add_special_tokens=adds_special,
        add_generation_prompt=begins,
        continue_final_message=continues,
    )
    return request, with_pieces
