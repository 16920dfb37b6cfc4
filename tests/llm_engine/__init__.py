"""Tests of llm_engine."""
