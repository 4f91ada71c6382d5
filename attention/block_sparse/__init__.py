"""Attention over kept blocks: one formulation to compare against, and one that saves the work."""
