"""The version of the contract between the routers, the workers and the controller of a cluster."""

# Raise it by one with each change after which older and newer processes must not serve a request
# together: a change of a message between them that the other side would misread or miss, of page
# layout, page hashes, digests or a transport's handshake, of the tokenizer.json that a GGUF file
# becomes, or of how a token is drawn (the next worker of a stream continues the draws of the one
# before it; resume tokens then get another version, too). A field that the other side may ignore
# needs no new version. Clients are not affected: their contract, protos/inference.proto, stays
# compatible. The changelog names each new version.
CONTRACT_VERSION = 6


def own_contract() -> int:
    """Return the version of the code that runs this."""
    return CONTRACT_VERSION


def contract_difference(found: int, allowed: int) -> str:
    """Return why another process is refused; empty: it is not.

    Args:
        found: Its version; 0: it stated none, as releases from before contract versions do.
        allowed: The version of the process that refuses.
    """
    return "" if found == allowed else f"contract version: found {found}; allowed: {allowed}"
