"""Agents: programs that call a model through the OpenAI protocol."""
