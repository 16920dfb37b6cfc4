"""The wire contract: *.proto files and the modules generated from them (see docs/protocol.md)."""
