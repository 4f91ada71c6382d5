"""Rotary low-rank attention: a linear branch that knows relative positions, beside block-sparse attention."""
