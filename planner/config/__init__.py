"""Configs: what a Hugging Face ``config.json`` says of a model, family by family, and what is refused of it."""
