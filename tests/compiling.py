"""For tests that compile: torch warns of itself while it does, and a warning is an error here."""

import pytest

torch_may_warn = pytest.mark.filterwarnings(r"ignore:::(torch|triton)\.")
"""Ignores warnings from modules of torch and triton alone: importing torch's compiler warns of torch.jit.script_method, say."""
