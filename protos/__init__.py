"""The wire contract: *.proto files and their generator, and what servers share beyond messages.

The generated modules are in pagewire.protos. See docs/protocol.md.
"""
