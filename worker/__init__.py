"""Hosts an engine in either pool: process, actor, step loop, service, identity."""
